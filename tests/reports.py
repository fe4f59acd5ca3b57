"""Reports for tests: runs with made-up curves, put together as comparisons are."""

from __future__ import annotations

import math
from typing import Any

from keyshift.results import Point, Report, RunResult, ShiftWeights, VariantResult


def rise(seed: int, middle: float, top: float, steps: int = 1000, every: int = 25) -> list[Point]:
    """A learning curve that climbs from a quarter to ``top`` around step ``middle``, later per seed."""
    points = []
    for step in range(0, steps + 1, every):
        climb = 1 / (1 + math.exp(-(step - middle - 40 * seed) / 22))
        accuracy = 0.25 + (top - 0.25) * climb + 0.004 * math.sin(step * (seed + 1))
        loss = 5.5 * math.exp(-step / 150) * (1 - climb) + 2.9 * (1 - climb) + 0.01 * (1 + seed / 4)
        points.append(Point(step=step, tokens=step * 4096, loss=loss, accuracy=min(accuracy, 1.0)))
    return points


def fall(seed: int, floor: float, steps: int = 2000, every: int = 100) -> list[Point]:
    """A language model's held-out loss."""
    points = []
    for step in range(0, steps + 1, every):
        loss = floor + 6.6 * math.exp(-step / 220) + 0.6 * math.exp(-step / 900) + 0.012 * seed
        points.append(Point(step=step, tokens=step * 8192, loss=loss, bits_per_byte=loss * 0.41))
    return points


def shift_weights(seed: int, layers: int, heads: int) -> list[ShiftWeights]:
    """Weights that lie near the induction corner in the first layer and anywhere in the others."""
    weights = []
    for layer in range(layers):
        own = [0.5 + 0.5 * math.sin(7 * layer * (head + 1) + seed) for head in range(heads)]
        if layer == 0:
            own = [0.1 * head + 0.07 * seed for head in range(heads)]
        weights.append(ShiftWeights(layer=layer, of="key", weights=[[w - 0.1, 1 - w] for w in own]))
        weights.append(ShiftWeights(layer=layer, of="value", weights=[[1.1 - w / 2, w / 2] for w in own]))
    return weights


def run(seed: int, curve: list[Point], **fields: Any) -> RunResult:
    steps = curve[-1].step if curve else 0
    return RunResult(**{"seed": seed, "status": "finished", "steps": steps, "curve": curve, **fields})


def variant(name: str, runs: list[RunResult], cached: int = 512, **fields: Any) -> VariantResult:
    config = {"attention": fields.pop("attention", "gqa"), "shift": fields.pop("shift", "none")}
    return VariantResult(
        **{"name": name, "config": config, "parameters": 66_304, "cache_bytes_per_token": cached, **fields},
        runs=runs,
    )


def report(kind: str, variants: list[VariantResult], **fields: Any) -> Report:
    return Report(
        **{
            "title": "Induction: does a one-layer model need the shift?",
            "kind": kind,
            "command": "keyshift compare recipes/induction.toml --seeds 0,1,2 --out results/induction",
            "created": "2026-01-05T09:30:00Z",
            "environment": {
                "keyshift": "0.1.0",
                "torch": "2.9.1",
                "processor": "AMD EPYC 7763",
                "threads": "2",
            },
            "recipe": {
                "task": {"name": "induction", "vocab_size": 256, "length": 64},
                "steps": 1000,
                "lr": 1e-3,
            },
            "data": {"training_tokens": 4_096_000, "chance_level": 0.00390625, "documents": {"a.txt": 12}},
            "complete": True,
            "variants": variants,
            **fields,
        }
    )


def at(step: int, accuracy: float, loss: float = 1.0) -> Point:
    return Point(step=step, tokens=step, loss=loss, accuracy=accuracy)


def grid(kind: str, cells: dict[tuple[str, ...], list[RunResult]], axes: list[str], **fields: Any) -> Report:
    """A comparison whose variants have labels on ``axes``.

    ``comparisons`` and ``paper`` are its recipe's, and ``recipe`` is what that has beside them.
    """
    defaults = {"axis": "variant", "metric": "loss"}
    recipe = {
        "comparisons": [{**defaults, **each} for each in fields.pop("comparisons", [])],
        "paper": fields.pop("paper", None),
        **fields.pop("recipe", {}),
    }
    variants = [
        variant(", ".join(labels), runs, labels=dict(zip(axes, labels, strict=True)))
        for labels, runs in cells.items()
    ]
    return report(kind, variants, recipe=recipe, **fields)


def ended(seed: int, loss: float, accuracy: float | None = None, **fields: Any) -> RunResult:
    """A finished run of which only the end is of interest."""
    return run(seed, [Point(step=10, tokens=10, loss=loss, accuracy=accuracy)], **fields)


def divergence_report(*metrics: str) -> Report:
    """Two variants on text at four learning rates: more runs blow up, or end above guessing, as it grows."""
    cells = {}
    for name, counts in {"vanilla": (0, 1, 3, 5), "KV shift": (0, 0, 2, 5)}.items():
        for rate, lost in zip(("0.001", "0.01", "0.1", "1"), counts, strict=True):
            losses = [9.0 + seed / 10 if seed < lost - 1 else 5.5 + seed / 10 for seed in range(5)]
            runs = [ended(seed, loss) for seed, loss in enumerate(losses)]
            cells[name, rate] = [*runs[:4], run(4, [], status="diverged", steps=30)] if lost else runs
    asked = [{"of": "KV shift", "against": "vanilla", "metric": metric} for metric in metrics]
    axes = ["variant", "learning rate"]
    return grid("text", cells, axes, comparisons=asked, data={"vocab_size": 2048})


def steps_report() -> Report:
    """Steps to 99% over the width: some runs never get there, one diverged and one failed on the way."""
    reached: dict[str, list[tuple[int | None, ...]]] = {
        "2 layers": [(None,) * 5, (None, None, 700, 750, None), (450, 400, 500, None, 425)],
        "1 layer + KV shift": [(None,) * 5, (300, 200, 250, None, 225), (150, 175, 200, 150, 125)],
    }
    cells = {
        (name, width): [learner(seed, step) for seed, step in enumerate(row)]
        for name, rows in reached.items()
        for width, row in zip(("8", "16", "32"), rows, strict=True)
    }
    cells["2 layers", "32"][0] = learner(0, None, steps=300, status="diverged")
    cells["1 layer + KV shift", "16"][4] = learner(4, None, steps=300, status="failed")
    asked = [{"of": "1 layer + KV shift", "against": "2 layers", "metric": "steps_to_99"}]
    axes, recipe = ["variant", "hidden size"], {"training": {"steps": 1000}}
    return grid("task", cells, axes, comparisons=asked, recipe=recipe, complete=False)


def learner(seed: int, reached: int | None, steps: int = 1000, **fields: Any) -> RunResult:
    """A run that reached 99% accuracy at a step, or never in all of its steps."""
    curve = [
        at(step, 1.0 if reached is not None and step >= reached else 0.5) for step in range(50, steps + 1, 50)
    ]
    return run(seed, curve, **{"steps": steps, **fields})


def width_report() -> Report:
    """Two variants at three widths with three seeds; two runs are lost, and the claim holds HTML."""
    cells = {
        (name, width): [run(s, rise(s, middle, 1.0, steps=600)) for s in range(3)]
        for name, middles in {"2 layers": (5000, 5000, 200), "1 layer + KV shift": (5000, 150, 60)}.items()
        for width, middle in zip(("8", "16", "64"), middles, strict=True)
    }
    cells["2 layers", "8"][1] = run(1, [], status="failed", message="killed by signal 9", steps=40)
    cells["2 layers", "64"][2] = run(2, [at(25, 0.1)], status="diverged", message="loss is nan", steps=30)
    compared = {"of": "1 layer + KV shift", "against": "2 layers"}
    return grid(
        "task",
        cells,
        ["variant", "hidden size"],
        comparisons=[{**compared, "metric": "accuracy"}, {**compared, "metric": "steps_to_99"}],
        paper="At <b>hidden size 8</b> one layer with KV shift learns.",
        complete=False,
    )


def score_report() -> Report:
    """Two variants with a score for every k and two other scores."""

    def scores(seed: int, slope: float) -> dict[str, float]:
        by_number = {f"k={k}": max(0.0, 1 - slope * k - 0.01 * seed) for k in (1, 2, 4, 8)}
        return {**by_number, "test lenient": 0.9 - slope, "test strict": 0.8 - slope - 0.05 * seed}

    cells = {
        (name,): [run(s, rise(s, 300, 0.9), scores=scores(s, slope)) for s in range(2)]
        for name, slope in {"vanilla": 0.1, "KV shift": 0.02}.items()
    }
    asked = [{"of": "KV shift", "against": "vanilla", "metric": name} for name in ("k=8", "test strict")]
    return grid("task", cells, ["variant"], comparisons=asked)

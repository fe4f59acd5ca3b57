"""What conversion and healing cost and give: `python scripts/adoption.py TEXT STORE OUT [--seeds 1]`.

TEXT is what scripts/corpus.py made (its prose/), STORE what ``keyshift data prepare`` made of it. For every
seed, in OUT, each step once (called again, it goes on):

- a source: the GQA model of recipes/pretrain/5m.toml, 1,000 steps;
- converted, at two widths of the rotary key, into GVA and into MLA of the same bytes;
- each of them healed for 200 steps; one, also with a KV shift put in, trained for as long on labels alone;
- GVA models of the same bytes from scratch: for as many steps as healing, and as healing and source together;
- the source with a KV shift put in, α and β alone trained for 200 steps, then all weights, and without a
  shift as many.

Then all are measured on the same held-out text, the store's. docs/results/adopt/losses.json is written, and
the table of docs/results/adopt.md is printed, to be put there between its markers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from keyshift import cache_bytes_per_token
from keyshift.attention.shift import shift_parameters
from keyshift.evaluation.text import passages
from keyshift.opened import Opened, open_checkpoint
from keyshift.runs import slug

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STEPS, HEALING, LENGTH, BATCH = 1000, 200, 256, 8
HEALED = f"runs/healed/seed-{{seed}}/checkpoint-{HEALING}"
CONVERTED = {
    "gva16": ("GVA, d_r = 16", ("--attention", "gva", "--rope-width", "16")),
    "gva8": ("GVA, d_r = 8", ("--attention", "gva", "--rope-width", "8")),
    "mla40": ("MLA, d_r = 40", ("--attention", "mla", "--rope-width", "40", "--latent-width", "32")),
    "gva8-shift": ("GVA + shift, d_r = 8", ("--attention", "gva", "--rope-width", "8", "--shift", "kv")),
}
"""By the name of a folder: what a table calls the conversion, and what it is made with."""
TRAINED = {
    "healed": ("healed", ("gva16", "gva8", "mla40"), ()),
    "labels": (
        "on labels alone",
        ("gva8", "gva8-shift"),
        ("training.distil_logits=0", "training.distil_attention=0", "training.distil_labels=1"),
    ),
}
"""By the name of a folder: what a table calls the training, conversions that get it, settings."""
PLAIN = ("training.probe_steps=1000000", "training.eval_steps=100")


@dataclass(frozen=True)
class Row:
    """A kind of model, and where the checkpoint of a seed lies."""

    name: str
    steps: int
    path: str


ROWS = [
    Row("GQA, the source", STEPS, "source/runs/gqa/seed-{seed}/checkpoint-1000"),
    *(
        Row("GVA from scratch, d_r = 8", steps, f"scratch-{steps}/runs/gva/seed-{{seed}}/checkpoint-{steps}")
        for steps in (HEALING, STEPS + HEALING)
    ),
    *(
        Row(f"{title}, converted", 0, f"converted/{name}-{{seed}}")
        for name, (title, _) in CONVERTED.items()
        if "shift" not in name  # which at the identity computes the same
    ),
    *(
        Row(f"{CONVERTED[name][0]}, {what}", HEALING, f"{kind}/{name}-{{seed}}/{HEALED}")
        for kind, (what, names, _) in TRAINED.items()
        for name in names
    ),
    Row("GQA, trained on", HEALING, "on/plain-{seed}/" + HEALED),
    Row(
        "GQA + shift, α and β alone", HEALING, "on/shift-{seed}/runs/α-and-β-alone/seed-{seed}/checkpoint-200"
    ),
    Row("GQA + shift, all weights", HEALING, "on/all-{seed}/runs/all-weights/seed-{seed}/checkpoint-200"),
]


def commands(text: Path, store: Path, out: Path, seed: int) -> Iterator[tuple[Path, list[str]]]:
    """What makes each checkpoint of a seed, and where it appears."""
    source = out / ROWS[0].path.format(seed=seed)
    yield source, train("pretrain/5m", store, out / "source", seed, "GQA", STEPS)
    for name, (_, how) in CONVERTED.items():
        made = out / f"converted/{name}-{seed}"
        yield made, ["convert", str(source), str(made), *how, "--text", str(text)]
        for kind, (_, names, settings) in TRAINED.items():
            if name in names:
                yield healed(store, out / kind / f"{name}-{seed}", seed, made, source, settings)
    yield from adopted(store, out, seed, source)
    for row in ROWS[1:3]:
        scratch = out / f"scratch-{row.steps}"
        yield (
            out / row.path.format(seed=seed),
            train("pretrain/5m", store, scratch, seed, "GVA", row.steps),
        )


def adopted(store: Path, out: Path, seed: int, source: Path) -> Iterator[tuple[Path, list[str]]]:
    """The source trained on, with a shift and without."""
    yield healed(store, out / f"on/plain-{seed}", seed, source, source, TRAINED["labels"][2])
    shifted = out / f"converted/shift-{seed}"
    yield shifted, ["convert", str(source), str(shifted), "--shift", "kv"]
    given = (f"training.start_from={shifted}", f"data.tokenizer={shifted}")
    rates = ("training.learning_rate=3e-4", 'variants."α and β alone".training.learning_rate=1e-3')
    for folder, variant, more in (("shift", "α and β alone", ()), ("all", "all weights", rates)):
        root = out / f"on/{folder}-{seed}"
        done = root / f"runs/{slug(variant)}/seed-{seed}/checkpoint-{HEALING}"
        yield done, train("adopt", store, root, seed, variant, HEALING, *given, *more)


def healed(
    store: Path, out: Path, seed: int, start: Path, source: Path, settings: tuple[str, ...]
) -> tuple[Path, list[str]]:
    """A run of the recipe ``heal`` from a checkpoint."""
    begun = (f"training.start_from={start}", f"training.distil_from={source}", f"data.tokenizer={start}")
    made = out / HEALED.format(seed=seed)
    return made, train("heal", store, out, seed, "healed", HEALING, *begun, *settings)


def train(recipe: str, store: Path, out: Path, seed: int, variant: str, steps: int, *more: str) -> list[str]:
    given = ["train", recipe, str(store), "--out", str(out), "--seed", str(seed), "--variant", variant]
    length = f"training.steps={steps}", f"data.sequence_length={LENGTH}", f"training.save_steps={HEALING}"
    rows = f"training.batch_size={BATCH}", f"engine.micro_batch_size={BATCH}"
    return [*given, "--resume", "auto", *length, *rows, *PLAIN, *more]


@torch.inference_mode()
def loss(opened: Opened, rows: torch.Tensor) -> float:
    """Nats per token over rows of held-out text."""
    found = [float(opened.model(each, labels=each, use_cache=False).loss) for each in rows.split(1)]
    return statistics.fmean(found)


def measure(store: Path, out: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """Losses on all pieces of held-out documents, bytes, and how far α and β went."""
    table = []
    for row in ROWS:
        losses, moved, bytes_ = [], [], 0
        for seed in seeds:
            opened = open_checkpoint(str(out / row.path.format(seed=seed)), "cpu", "float32")
            rows = passages(opened, store, LENGTH, sys.maxsize)
            losses.append(loss(opened, rows))
            bytes_ = cache_bytes_per_token(opened.model.config, torch.bfloat16)
            shifts = [weight.detach() - torch.tensor([1.0, 0.0]) for weight in shift_parameters(opened.model)]
            moved += [float(weight.abs().max()) for weight in shifts]
        table.append({"name": row.name, "steps": row.steps, "losses": losses, "bytes": bytes_})
        if moved:
            table[-1]["shift_moved"] = max(moved)
        Console(stderr=True).print(f"{row.name}: {losses}")
    return table


def rendered(table: list[dict[str, Any]]) -> str:
    base = table[0]["losses"]
    lines = [
        "| model | steps of its own | cache, bytes/token | loss, nats | perplexity | over the source, nats |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        mean = statistics.fmean(row["losses"])
        apart = [own - source for own, source in zip(row["losses"], base, strict=True)]
        spread = f" ({min(apart):+.3f} … {max(apart):+.3f})" if len(apart) > 1 else ""
        lines.append(
            f"| {row['name']} | {row['steps']:,} | {row['bytes']:,} | {mean:.3f} | {math.exp(mean):.1f} "
            f"| {statistics.fmean(apart):+.3f}{spread} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("text", "store", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for seed in range(options.seeds):
        for made, command in commands(options.text, options.store, options.out, seed):
            if not made.exists():
                subprocess.run([sys.executable, "-m", "keyshift.cli", *command], check=True)
    table = measure(options.store, options.out, list(range(options.seeds)))
    (RESULTS / "adopt" / "losses.json").write_text(json.dumps(table, indent=1) + "\n")
    sys.stdout.write(rendered(table) + "\n")


if __name__ == "__main__":
    main()

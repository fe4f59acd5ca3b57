"""The report of circuits: packed patterns, files, the page in a real browser, the terminal."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium_fixture, console_errors, prefer, requested_urls, resize  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from keyshift.circuits.report import Patterns, print_circuits, summary, write_circuits
from keyshift.circuits.report.patterns import BUDGET, fit, pack, payload
from keyshift.circuits.results import (
    AblationResult,
    CircuitsReport,
    CompositionResult,
    CopyingExample,
    CopyResult,
    CorrelationResult,
    HeadResult,
    Levels,
    LiftResult,
    ModelFacts,
    ModelResult,
    ParkingResult,
    Part,
    Positivity,
    PromptResult,
    PromptRow,
    QuadrantResult,
    RepeatsResult,
)

HOSTILE = "</script><img src=x onerror=alert(1)>"


# --- reports to work with


def wave(*numbers: int) -> float:
    """A number in [0, 1] that looks random and is always the same."""
    return 0.5 + 0.5 * math.sin(
        sum((place + 1.7) * 12.9898 * number for place, number in enumerate(numbers, 1))
    )


def facts(name: str, layers: int, heads: int, **fields: Any) -> ModelFacts:
    sizes = {"hidden_size": 64 * heads, "head_width": 64, "vocabulary": 48_262, "context": 1024}
    kinds = {"kind": "attention-only", "key_value_heads": heads, "position": "learned", "dtype": "float32"}
    return ModelFacts(
        **{
            "name": name,
            "layers": layers,
            "heads": heads,
            "parameters": 50_000_000,
            **sizes,
            **kinds,
            **fields,
        }
    )


def repeats(period: int, copies: int, losses: list[float]) -> RepeatsResult:
    """Losses per copy, with a first prediction of each copy as bad as in the first."""
    by_position = [
        losses[0] if place % period == 0 else losses[place // period] + 0.3 * (wave(place) - 0.5)
        for place in range(period * copies)
    ]
    return RepeatsResult(
        period=period,
        repeats=copies,
        sequences=100,
        seed=0,
        with_replacement=True,
        uniform_loss=math.log(48_262),
        copies=[CopyResult(copy_index=i + 1, loss=x, top1=math.exp(-x / 5)) for i, x in enumerate(losses)],
        loss_by_position=by_position,
        top1_by_position=[math.exp(-x) for x in by_position],
    )


LEVELS = Levels(previous_token=0.044, induction=0.013, duplicate_token=0.013, first_token=0.044)


def positivity(value: float) -> Positivity:
    return Positivity(value=value, condition=10 ** (1 + 2 * abs(value)))


def model(name: str, heads: list[HeadResult], repeated: RepeatsResult, **fields: Any) -> ModelResult:
    shape = heads[-1].layer + 1, max(head.head for head in heads) + 1
    settings = {"convention": "paper", "norms_folded": True, "levels": LEVELS, "seconds": 42.17}
    return ModelResult(
        **{"facts": facts(name, *shape), "heads": heads, "repeats": repeated, **settings, **fields}
    )


def report(*models: ModelResult) -> CircuitsReport:
    return CircuitsReport(
        command="keyshift circuits attn-only-2l --out results/circuits",
        created="2026-01-05T09:30:00Z",
        environment={"keyshift": "0.1.0", "torch": "2.13.0", "processor": "AMD EPYC 7763"},
        models=list(models),
    )


PREVIOUS = {"0.0": 0.20, "0.3": 0.52}
INDUCTION = {"1.6": 0.66, "1.7": 0.03}
EFFECT = {"0.3": 8.44, "0.0": 2.92, "1.6": 9.63, "1.7": 0.36, "1.1": -0.08}
COPYING = [0.72, 0.11, 0.94, 0.57, 0.03, 0.71, 1.0, 1.0]
MATCHING = [0.10, -0.08, -0.24, 0.85, -0.36, -0.06, 1.0, 0.98]
PIECES = {
    "0.3": (6.30, 2.12),
    "0.0": (3.01, 0.77),
    "embedding": (3.34, 3.09),
    "0.1": (0.63, 0.39),
    "bias": (9.76, 9.78),
}


def two_layer_head(layer: int, head: int) -> HeadResult:
    name = f"{layer}.{head}"
    return HeadResult(
        layer=layer,
        head=head,
        key_value_head=head,
        previous_token=PREVIOUS.get(name, 0.1 * wave(layer, head)),
        induction=INDUCTION.get(name, 0.004 * wave(head)),
        duplicate_token=0.3 * wave(head, 3) if layer == 0 else 0.01,
        first_token=wave(layer, head, 5),
        ov=positivity(COPYING[head] if layer else wave(head) - 0.6),
        copies=0.99 if name == "1.6" else 0.01,
        matching=positivity(MATCHING[head]) if layer else None,
        matching_with="0.3" if layer else None,
        direct=positivity(0.5 - wave(head, 9)),
        induction_loss_increase=EFFECT.get(name, 0.3 * wave(layer, head) - 0.1),
    )


def two_layer() -> ModelResult:
    """Two layers of eight heads, with the numbers of the text on induction heads."""
    heads = [two_layer_head(layer, head) for layer in range(2) for head in range(8)]
    composed = [0.081, 0.067, 0.038, 0.124, 0.058, 0.044, 0.040, 0.045]
    whole = {"heads": [], "role": "", "loss": [15.04, 3.41], "top1": [0.0, 0.559], "induction": {"1.6": 0.66}}
    return model(
        "attn-only-2l",
        heads,
        repeats(50, 2, [15.04, 3.41]),
        previous_token_head="0.3",
        induction_heads=["1.6"],
        compositions=[
            CompositionResult(
                into="1.6",
                kind=kind,
                scores={f"0.{i}": s * size for i, s in enumerate(composed)},
                baseline=0.044,
            )
            for kind, size in (("K", 1.0), ("Q", 0.5), ("V", 0.4))
        ],
        lifts=[
            LiftResult(
                sequences=8,
                head="1.6",
                side=side,
                parts=[Part(name=n, target=t, average=a, lift=t - a) for n, (t, a) in PIECES.items()],
                score=30.93,
                residual=2.4e-6,
            )
            for side in ("key", "query")
        ],
        ablation_method="the head's result replaced by its mean over positions and sequences",
        ablations=[
            AblationResult(**whole),
            *(
                AblationResult(
                    heads=[n], role=role, loss=[14.5, loss], top1=[0.0, 0.1], induction={"1.6": left}
                )
                for n, role, loss, left in (
                    ("0.3", "previous-token head", 11.85, 0.06),
                    ("0.0", "second previous-token head", 6.33, 0.37),
                    ("1.6", "induction head", 13.04, 0.66),
                    ("0.7", "control: least previous-token head", 4.15, 0.64),
                )
            ),
        ],
        parking=[ParkingResult(head="1.6", period=8, first_copy_first_token=0.95, second_copy_target=0.41)],
        copying=[CopyingExample(head="1.6", token=" Paris", raises=[" Paris", "Paris", " Geneva"])],
        prompt=PromptResult(
            text="The teacher Mrs Brindlewick\n",
            tokens=["<|BOS|>", "The", " teacher", " Mrs", " Br", "indle", "wick", "\n", HOSTILE],
            rows=[
                PromptRow(
                    position=17,
                    token="indle",
                    next_token=HOSTILE,
                    probability=0.98,
                    head="1.6",
                    reads="wick",
                    reads_position=8,
                    weight=0.75,
                    logit=13.82,
                )
            ],
        ),
        findings=[
            "The second copy is predicted with a loss of 3.41 nats, the first with 15.04.",
            "Head 1.6 looks at the token after the earlier copy with a mean weight of 0.66.",
        ],
        notes=["The Q-composition baseline is a mean of 20 draws."],
    )


def twelve() -> ModelResult:
    """Twelve layers of twelve heads, several of them induction heads."""
    strong = {(5, 1): 0.93, (5, 5): 0.9, (6, 9): 0.91, (7, 2): 0.6, (7, 10): 0.85}
    heads = []
    for layer in range(12):
        for head in range(12):
            score = strong.get((layer, head), 0.05 * wave(layer, head))
            made = positivity(min(1, (0.9 if score > 0.5 else 0) + wave(head, layer) - 0.3))
            heads.append(
                HeadResult(
                    layer=layer,
                    head=head,
                    key_value_head=head,
                    previous_token=0.98 if (layer, head) == (4, 11) else 0.3 * wave(layer, head, 2) ** 3,
                    induction=score,
                    duplicate_token=0.6 * wave(layer, head, 4) ** 4,
                    first_token=wave(layer, head, 5) ** 0.5 if layer > 3 else 0.1,
                    ov=made,
                    copies=max(0.0, made.value) ** 3,
                    matching=positivity(min(1, score + wave(layer, head, 7) - 0.5)) if layer > 4 else None,
                    matching_with="4.11" if layer > 4 else None,
                    direct=positivity(wave(layer, head, 8) * 2 - 1),
                    induction_loss_increase=0.4 * score + 0.02 * wave(layer),
                )
            )
    names = [f"{layer}.{head}" for layer, head in sorted(strong, key=lambda place: -strong[place])]
    parts = [
        ("embedding", 0.4),
        ("position", 0.1),
        ("4.11", 6.1),
        *((f"{i % 5}.{i % 12}", wave(i) - 0.5) for i in range(60)),
    ]
    return model(
        "gpt2",
        heads,
        repeats(50, 2, [13.6, 0.42]),
        facts=facts("gpt2", 12, 12, kind="gpt2", vocabulary=50_257, parameters=124_439_808),
        previous_token_head="4.11",
        induction_heads=names,
        compositions=[
            CompositionResult(
                into=into,
                kind=kind,
                scores={
                    f"{a}.{b}": 0.02 + 0.1 * wave(a, b, ord(kind)) ** 5 for a in range(5) for b in range(12)
                },
                baseline=0.031,
            )
            for into in names
            for kind in ("K", "Q", "V")
        ],
        lifts=[
            LiftResult(
                sequences=8,
                head=name,
                side="key",
                parts=[Part(name=n, target=lift + 1, average=1, lift=lift) for n, lift in parts],
                score=41.2,
                residual=3e-5,
            )
            for name in names
        ],
        ablation_method="mean",
        ablations=[
            AblationResult(heads=[], role="", loss=[13.6, 0.42], top1=[0.0, 0.92], induction={"5.1": 0.93}),
            *(
                AblationResult(
                    heads=[n], role=role, loss=[13.6, loss], top1=[0.0, 0.8], induction={"5.1": 0.3}
                )
                for n, role, loss in (("4.11", "previous-token head", 1.9), ("0.0", "control", 0.43))
            ),
            AblationResult(
                heads=names, role="all", loss=[13.6, 5.2], top1=[0.0, 0.2], induction={"5.1": 0.9}
            ),
        ],
        findings=["Five heads stand out by their induction score: " + ", ".join(names) + "."],
    )


def shifted() -> ModelResult:
    """One layer of four heads whose keys and values are shifted."""
    weights = [
        ([0.05, 0.93], [1.02, -0.04]),
        ([0.9, 0.1], [0.8, 0.2]),
        ([0.3, 0.6], [0.2, 0.7]),
        ([0.7, 0.2], [0.1, 0.9]),
    ]
    scores = [0.88, 0.02, 0.11, 0.01]
    heads = [
        HeadResult(
            layer=0,
            head=index,
            key_value_head=index // 2,
            previous_token=0.1 * index,
            induction=scores[index],
            duplicate_token=0.05,
            first_token=0.2,
            induction_flow=scores[index] * 0.9,
            ov=positivity(0.98 - 0.4 * index),
            copies=0.9 - 0.2 * index,
            matching=positivity(0.99 - 0.5 * index),
            matching_with="shift",
            direct=positivity(-0.1 * index),
            key_shift=alpha,
            value_shift=beta,
            induction_loss_increase=2.1 * scores[index],
        )
        for index, (alpha, beta) in enumerate(weights)
    ]
    quadrant = {(True, False): "0.0", (False, False): "0.1", (True, True): "0.2", (False, True): "0.3"}
    return model(
        "one-layer-shift",
        heads,
        repeats(20, 3, [6.9, 0.8, 0.5]),
        facts=facts(
            "one-layer-shift", 1, 4, kind="keyshift gqa, learned, kv", key_value_heads=2, vocabulary=1024
        ),
        induction_heads=["0.0"],
        lifts=[
            LiftResult(
                sequences=8,
                head="0.0",
                side="key",
                parts=[
                    Part(name="embedding", shift=1, target=9.1, average=1.0, lift=8.1),
                    Part(name="embedding", shift=0, target=0.2, average=0.3, lift=-0.1),
                    Part(name="position", shift=0, target=1.0, average=0.8, lift=0.2),
                ],
                score=10.3,
                residual=1e-6,
            )
        ],
        quadrants=[
            QuadrantResult(key_previous=k, value_previous=v, heads=[n], induction=0.3, loss_increase=0.5)
            for (k, v), n in quadrant.items()
        ],
        correlations=[
            CorrelationResult(of="both", against="induction", rho=0.8, p_value=0.2, sets=4),
            CorrelationResult(of="key", against="loss_increase", rho=None, p_value=None, sets=4),
        ],
        findings=["Head 0.0 does induction in one layer."],
    )


def bare() -> ModelResult:
    """One layer, one head, and nothing that may be missing."""
    head = HeadResult(
        layer=0, head=0, key_value_head=0, previous_token=0, induction=0, duplicate_token=0, first_token=1
    )
    nothing = RepeatsResult(
        period=1,
        repeats=1,
        sequences=1,
        seed=0,
        with_replacement=False,
        uniform_loss=0,
        copies=[],
        loss_by_position=[],
        top1_by_position=[],
    )
    return model("bare", [head], nothing, norms_folded=False, facts=facts("bare", 1, 1, context=None))


def flagged() -> ModelResult:
    """A head whose matrices are all zero, and lists that are there but say little."""
    zero = Positivity(value=0, condition=1, zero=True)
    head = (
        bare().heads[0].model_copy(update={"ov": zero, "matching": zero, "direct": zero, "key_shift": [1.0]})
    )
    made = bare().model_copy(update={"heads": [head], "repeats": repeats(1, 1, [0.0])})
    lift = LiftResult(head="0.0", side="query", parts=[], sequences=1, score=0, residual=0)
    empty = CompositionResult(into="0.0", kind="K", scores={}, baseline=0)
    alone = AblationResult(heads=[], role="", loss=[0.0], top1=[1.0], induction={})
    quadrant = QuadrantResult(key_previous=False, value_previous=False, heads=[])
    prompt = PromptResult(text="a", tokens=["a"], rows=[])
    lists = {"lifts": [lift], "compositions": [empty], "ablations": [alone], "quadrants": [quadrant]}
    return made.model_copy(update={**lists, "prompt": prompt})


def attention(layers: int, heads: int, count: int, period: int) -> np.ndarray:
    """Heads that rest on the first token, look one back, or look where induction does."""
    weights = np.zeros((layers, heads, count, count))
    for i in range(count):
        weights[..., i, 0] += 0.3
        weights[..., i, max(i - 1, 0)] += 0.2
        weights[..., i, : i + 1] += 0.1 / (i + 1)
        found = i - period + 1 if i > period else 0
        weights[-1, :, i, found] += 2.0
        weights[0, :, i, max(i - 1, 0)] += 1.0
    return weights / weights.sum(-1, keepdims=True)


def patterns(made: ModelResult, tokens: list[str] | None = None, **fields: Any) -> Patterns:
    """Patterns of a model's size, on BOS and random words that repeat."""
    period = made.repeats.period
    words = [f"{'␣' if wave(i) > 0.5 else ''}{'abcdefgh'[i % 8]}{i}" for i in range(period)]
    tokens = tokens or ["<|BOS|>", *(words * made.repeats.repeats)]
    shape = made.facts.layers, made.facts.heads
    norms = np.full((*shape, len(tokens)), 1.5)
    norms[..., 0] = 0.05
    return Patterns(tokens, attention(*shape, len(tokens), period), norms, **fields)


def shifted_patterns() -> Patterns:
    made = shifted()
    return patterns(made, value_shift=[[head.value_shift or [] for head in made.heads]])


CASES = {
    "bare": (report(bare()), [None]),
    "flagged": (report(flagged()), [patterns(flagged())]),
    "no models": (report(), []),
    "two layers": (report(two_layer()), [patterns(two_layer())]),
    "shifted": (report(shifted()), [shifted_patterns()]),
    "several": (
        report(two_layer(), shifted(), bare()),
        [patterns(two_layer()), shifted_patterns(), None],
    ),
    "twelve": (report(twelve()), [patterns(twelve())]),
}


# --- packed patterns


@st.composite
def causal_weights(draw: st.DrawFn) -> np.ndarray:
    """Attention of random size: rows that sum to 1, with nothing above the diagonal."""
    layers, heads, count = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = np.tril(random.random((layers, heads, count, count)) ** draw(st.integers(1, 9)) + 1e-9)
    return weights / weights.sum(-1, keepdims=True)


def unpacked(packed: str, layers: int, heads: int, count: int) -> np.ndarray:
    """What the page's script reads: byte i (i + 1) / 2 + j of a head is weight (i, j)."""
    levels = np.frombuffer(base64.b64decode(packed), np.uint8).reshape(layers, heads, -1)
    weights = np.zeros((layers, heads, count, count))
    for i in range(count):
        for j in range(i + 1):
            weights[:, :, i, j] = levels[:, :, i * (i + 1) // 2 + j] / 255
    return weights


@settings(max_examples=50, deadline=None)
@given(causal_weights())
def test_packed_weights_come_back_in_place_and_nearly_the_same(weights: np.ndarray) -> None:
    layers, heads, count, _ = weights.shape
    assert np.abs(unpacked(pack(weights), layers, heads, count) - weights).max() <= 0.5 / 255 + 1e-12


def test_packing_clips_what_rounding_put_outside() -> None:
    weights = np.array([[[[1.0000001, 0], [-1e-8, 1.0]]]])
    assert unpacked(pack(weights), 1, 1, 2).tolist() == [[[[1, 0], [0, 1]]]]


def uniform(layers: int, heads: int, count: int, note: str = "") -> Patterns:
    weights = np.tril(np.ones((count, count))) / np.arange(1, count + 1)[:, None]
    everywhere = np.broadcast_to(weights, (layers, heads, count, count))
    return Patterns([f"t{i}" for i in range(count)], everywhere, np.ones((layers, heads, count)), note=note)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 40)), min_size=1, max_size=3),
    st.integers(60, 4000),
)
def test_patterns_are_cut_to_the_longest_that_fits(sizes: list[tuple[int, int, int]], budget: int) -> None:
    given = [uniform(*size) for size in sizes]

    def bytes_of(shown: list[Patterns]) -> int:
        return sum(len(pack(each.weights_LHTT)) for each in shown)

    kept = [each for each in fit(given, budget) if each]
    assert bytes_of(kept) <= budget
    length = max((len(each.tokens) for each in kept), default=0)
    if length < max(len(each.tokens) for each in given):
        assert bytes_of([each.first(length + 1) for each in given]) > budget


def test_a_cut_is_said_and_keeps_the_first_tokens() -> None:
    (cut,) = fit([uniform(12, 12, 300, "A novel.")])
    assert cut is not None
    length = len(cut.tokens)
    assert cut.tokens == [f"t{i}" for i in range(length)]
    assert cut.note == f"A novel. The first {length} of 300 tokens are shown, to keep this page small."
    assert 0.97 * BUDGET < len(pack(cut.weights_LHTT)) <= BUDGET
    assert cut.value_norms_LHT.shape == (12, 12, length)
    (whole,) = fit([uniform(1, 1, 20, "A novel.")])
    assert whole is not None
    assert whole.note == "A novel."


def test_a_model_too_large_for_one_token_has_no_viewer() -> None:
    assert fit([uniform(4, 4, 3), None], budget=8) == [None, None]


def test_norms_keep_four_digits_and_what_cannot_be_seen_gets_a_sign() -> None:
    made = Patterns(["a\n", "", "\t"], np.tril(np.ones((1, 1, 3, 3))), np.full((1, 1, 3), 123.45678))
    shown = payload(made)
    assert shown["norms"] == [[[123.5] * 3]]
    assert shown["tokens"] == ["a↵", "(empty)", "⇥"]


# --- files


@pytest.mark.parametrize("case", CASES)
def test_reports_are_written_without_a_warning(case: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_circuits(*CASES[case], tmp_path)
    page = (tmp_path / "circuits.html").read_text()
    assert "None" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"\bnan\b", re.sub(r"<script.*?</script>|base64,[^\"]*", "", page, flags=re.DOTALL))
    assert json.loads((tmp_path / "circuits.json").read_text())["schema_version"] == 1


def test_circuits_json_reads_back(tmp_path: Path) -> None:
    write_circuits(*CASES["several"], tmp_path / "new" / "folder")
    read = (tmp_path / "new" / "folder" / "circuits.json").read_bytes()
    assert CircuitsReport.model_validate_json(read) == CASES["several"][0]


def test_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        write_circuits(*CASES["several"], tmp_path / name)
        pages.append((tmp_path / name / "circuits.html").read_bytes())
    assert pages[0] == pages[1]
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"circuits.json", "circuits.html"}


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_circuits(*CASES["bare"], tmp_path)
    before = (tmp_path / "circuits.json").read_bytes()

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_circuits(*CASES["two layers"], tmp_path)
    assert (tmp_path / "circuits.json").read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_page_needs_one_entry_of_patterns_per_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shorter"):
        write_circuits(report(bare()), [], tmp_path)


def test_a_large_model_stays_small_and_asks_for_nothing(tmp_path: Path) -> None:
    long = patterns(twelve(), [f"token{i}" for i in range(400)])
    write_circuits(report(twelve()), [long], tmp_path)
    page = (tmp_path / "circuits.html").read_text()
    assert len(page.encode()) <= 3_000_000
    assert re.search(r"The first \d+ of 400 tokens are shown", page)
    assert not re.search(r"https?://", page)


def test_importing_the_report_loads_no_drawing_library() -> None:
    code = "import sys, keyshift.circuits.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=30),
    st.lists(st.floats(-20, 20), max_size=30),
    st.text(max_size=50),
)
def test_any_numbers_and_names_can_be_drawn(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], lifts: list[float], name: str
) -> None:
    heads = [
        bare()
        .heads[0]
        .model_copy(
            update={
                "head": index,
                "induction": abs(value),
                "ov": positivity(value),
                "matching": positivity(values[-1 - index]),
                "matching_with": name,
                "induction_loss_increase": value,
            }
        )
        for index, value in enumerate(values)
    ]
    parts = [Part(name=name, shift=index % 2, target=x, average=0, lift=x) for index, x in enumerate(lifts)]
    made = model(
        name,
        heads,
        repeats(3, 2, [abs(values[0]), 0.0]),
        induction_heads=[heads[0].name],
        lifts=[
            LiftResult(head=heads[0].name, side="key", parts=parts, sequences=1, score=values[0], residual=0)
        ],
        compositions=[CompositionResult(into="0.0", kind="K", scores={name: abs(values[0])}, baseline=0.1)],
        ablations=[AblationResult(heads=[name], role=name, loss=[abs(values[0])], top1=[0], induction={})],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_circuits(report(made), [None], tmp_path_factory.mktemp("page"))


# --- the terminal


def printed(shown: CircuitsReport, width: int = 80) -> str:
    output = io.StringIO()
    print_circuits(shown, Console(file=output, width=width))
    return output.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_the_terminal_fits_80_columns(case: str) -> None:
    text = printed(CASES[case][0])
    assert max(map(len, text.splitlines()), default=0) <= 80
    assert "…" not in text


def test_the_terminal_shows_heads_copies_and_findings() -> None:
    text = printed(report(two_layer()))
    row = next(line for line in text.splitlines() if line.startswith("1.6"))
    assert row.split()[2] == "0.66"
    assert row.split()[-3:] == ["+1.00", "+1.00", "+9.63"]
    assert "copy 2: loss 3.410" in text
    assert two_layer().findings[1] in " ".join(text.split())
    assert two_layer().notes[0] in " ".join(text.split())
    assert "α1" not in text


def test_the_terminal_shows_shift_weights() -> None:
    row = next(line for line in printed(report(shifted())).splitlines() if line.startswith("0.0"))
    assert row.split()[-5:] == ["+0.05", "+0.93", "+1.02", "−0.04", "+1.85"]


def test_of_a_large_model_the_terminal_shows_the_strongest_heads() -> None:
    text = printed(report(twelve()))
    names = re.findall(r"^(\d+\.\d+) ", text, flags=re.MULTILINE)
    assert {"4.11", *twelve().induction_heads} <= set(names)
    assert len(names) <= 16
    assert f"{len(names)} of 144 heads" in text


def test_markup_in_names_is_text() -> None:
    made = two_layer().model_copy(update={"findings": ["[red]not red[/red]"]})
    assert "[red]not red[/red]" in printed(report(made))


def test_summary_is_plain_and_complete() -> None:
    first, second, third = json.loads(json.dumps(summary(CASES["several"][0]), allow_nan=False))
    assert (first["model"], first["previous_token_head"], first["induction_heads"]) == (
        "attn-only-2l",
        "0.3",
        ["1.6"],
    )
    assert first["loss_by_copy"] == [15.04, 3.41]
    head = next(head for head in first["heads"] if head["head"] == "1.6")
    assert (head["induction"], head["ov"], head["copies"]) == (0.66, 1.0, 0.99)
    assert (head["induction_loss_increase"], head["key_shift"]) == (9.63, None)
    assert second["heads"][0]["value_shift"] == [1.02, -0.04]
    assert third["heads"][0]["ov"] is None
    assert summary(report(flagged()))[0]["heads"][0]["ov"] is None


# --- the page


def open_page(driver: webdriver.Chrome, case: str, directory: Path, width: int = 1280) -> None:
    write_circuits(*CASES[case], directory)
    resize(driver, width)
    console_errors(driver)
    requested_urls(driver)
    driver.get((directory / "circuits.html").as_uri())


def one(driver: webdriver.Chrome, selector: str) -> WebElement:
    (found,) = driver.find_elements(By.CSS_SELECTOR, selector)
    return found


def point_at(driver: webdriver.Chrome, element: WebElement, right: float = 0, down: float = 0) -> None:
    """Move the pointer to the middle of an element, or to an offset from it."""
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    ActionChains(driver, duration=0).move_to_element_with_offset(element, round(right), round(down)).perform()


PANELS = {
    "two layers": ("repeats", "maps", "patterns", "ablations", "parking", "copying", "prompt"),
    "shifted": ("repeats", "maps", "patterns", "shift"),
    "twelve": ("repeats", "maps", "patterns", "ablations"),
    "bare": ("repeats", "maps"),
}
FIGURES = {
    "two layers": ("loss", "eigenvalues", "composition-1.6", "lift-1.6-key", "lift-1.6-query", "ablations"),
    "shifted": ("loss", "eigenvalues", "lift-0.0-key"),
    "twelve": (
        "loss",
        "eigenvalues",
        *(f"composition-{head}" for head in ("5.1", "6.9", "5.5", "7.10")),
        *(f"lift-{head}-key" for head in ("5.1", "6.9", "5.5", "7.10")),
        "ablations",
    ),
    "bare": (),
}


@pytest.mark.parametrize("case", PANELS)
def test_every_panel_is_there_and_none_is_empty(
    chromium: webdriver.Chrome, tmp_path: Path, case: str
) -> None:
    open_page(chromium, case, tmp_path)
    model_ = one(chromium, ".model")
    panels = model_.find_elements(By.CSS_SELECTOR, "[id]:not(figure):not(.map)")
    assert [panel.get_attribute("id") for panel in panels] == [f"model-0-{name}" for name in PANELS[case]]
    for panel in panels:
        assert panel.rect["height"] > 40
    figures = model_.find_elements(By.CSS_SELECTOR, "figure:not(.map)")
    assert [figure.get_attribute("id") for figure in figures] == [
        f"figure-model-0-{n}" for n in FIGURES[case]
    ]
    for figure in figures:
        image = figure.find_element(By.TAG_NAME, "img")
        assert chromium.execute_script("return arguments[0].naturalWidth", image) > 0
        assert len(image.get_attribute("alt")) > 40
    assert console_errors(chromium) == []
    urls = requested_urls(chromium)
    assert urls
    assert all(url.startswith(("file:", "data:", "about:")) for url in urls)


def test_heat_maps_have_a_cell_per_head_with_its_value(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    titles = [title.text for title in chromium.find_elements(By.CSS_SELECTOR, ".map h4")]
    assert titles == [
        "Previous token",
        "Induction",
        "Duplicate token",
        "First token",
        "Copying (OV)",
        "Copied tokens",
        "Same matching",
        "Direct matching (QK)",
        "Effect of ablation",
    ]
    induction = one(chromium, "#model-0-map-induction")
    assert len(induction.find_elements(By.TAG_NAME, "td")) == 1 + 16
    cell = induction.find_element(By.CSS_SELECTOR, "td[data-head='1.6']")
    assert (cell.text, cell.get_attribute("title")) == (".66", "head 1.6: 0.6600")
    assert "An even spread would score 0.013." in induction.text
    matching = one(chromium, "#model-0-map-matching td[data-head='1.2']")
    assert (matching.text, matching.value_of_css_property("background-color")) == (
        "−.24",
        "rgba(213, 94, 0, 0.24)",
    )
    assert matching.get_attribute("title").startswith("head 1.2: -0.2400, through head 0.3, condition ")
    effect = one(chromium, "#model-0-map-induction_loss_increase td[data-head='1.6']")
    assert (effect.text, effect.get_attribute("title")) == ("9.6", "head 1.6: +9.6300 nats")


def test_a_zero_matrix_says_nothing(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "flagged", tmp_path)
    assert not chromium.find_elements(
        By.CSS_SELECTOR, "#model-0-map-ov, #model-0-map-matching, img[alt*=Scatter]"
    )


def test_numbers_of_the_report_are_on_the_page(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    for summary_ in chromium.find_elements(By.TAG_NAME, "summary"):
        summary_.click()
    text = " ".join(one(chromium, "main").text.split())
    for expected in (
        "2 layers of 8 heads",
        two_layer().findings[0],
        two_layer().notes[0],
        "score at the target is +30.93; the parts add up to the model's scores within 2e-06",
        "(the head's result replaced by its mean over positions and sequences)",
        "0.3 (previous-token head) 14.500 11.850 0.0% 10.0% 0.06",
        "0.7 (control: least previous-token head) 14.500 4.150",
        "mean weight 0.95 on the first token within the first copy, and 0.41",
        f"17 indle {HOSTILE} 0.98 1.6 8 wick 0.75 +13.82",
        "keyshift circuits attn-only-2l --out results/circuits",
        "AMD EPYC 7763",
        "2026-01-05 09:30 UTC",
    ):
        assert expected in text


def test_small_effects_do_not_look_strong(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    head = bare().heads[0].model_copy(update={"induction_loss_increase": 0.002})
    write_circuits(report(bare().model_copy(update={"heads": [head]})), [None], tmp_path)
    chromium.get((tmp_path / "circuits.html").as_uri())
    cell = one(chromium, "#model-0-map-induction_loss_increase td[data-head]")
    assert cell.value_of_css_property("background-color") == "rgba(0, 114, 178, 0.02)"


def test_heads_by_shift_weights(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "shifted", tmp_path)
    cells = [cell.text.split("\n") for cell in chromium.find_elements(By.CSS_SELECTOR, ".quadrants tbody td")]
    assert [(cell[0], cell[1]) for cell in cells] == [("1", "0.1"), ("1", "0.0"), ("1", "0.3"), ("1", "0.2")]
    assert cells[0][2:] == ["induction 0.30", "ablation +0.50"]
    text = one(chromium, "#model-0-shift").text
    assert "both induction score +0.80 0.2 4" in text
    assert "key (share on earlier tokens) effect of ablation – – 4" in text
    assert "0.0 0.050 0.930 1.020 -0.040 0.88 +1.85" in text


def test_several_models_have_sections_of_their_own(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "several", tmp_path)
    names = [element.text for element in chromium.find_elements(By.CSS_SELECTOR, ".model > h2")]
    assert names == ["attn-only-2l", "one-layer-shift", "bare"]
    ids = [element.get_attribute("id") for element in chromium.find_elements(By.CSS_SELECTOR, "[id]")]
    assert len(ids) == len(set(ids))
    viewers = [
        bool(m.find_elements(By.CSS_SELECTOR, ".viewer"))
        for m in chromium.find_elements(By.CSS_SELECTOR, ".model")
    ]
    assert viewers == [True, True, False]
    for number, tokens in ((0, 101), (1, 61)):
        assert len(chromium.find_elements(By.CSS_SELECTOR, f"#model-{number} .tokens li")) == tokens
    assert console_errors(chromium) == []


# --- the pattern viewer


def highlighted(driver: webdriver.Chrome) -> dict[int, float]:
    """The strength of every coloured token's background."""
    tokens = driver.find_elements(By.CSS_SELECTOR, ".tokens li")
    strengths = {}
    for place, token in enumerate(tokens):
        colour = token.value_of_css_property("background-color")
        *_, strength = re.findall(r"[\d.]+", colour)
        if float(strength) > 0:
            strengths[place] = float(strength)
    return strengths


def test_pointing_at_a_token_shows_where_it_looks(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    tip = one(chromium, ".tip")
    assert not tip.is_displayed()
    weights = attention(2, 8, 101, 50)[1, 6, 60]
    tokens = chromium.find_elements(By.CSS_SELECTOR, ".tokens li")
    point_at(chromium, tokens[60])
    assert tip.text.startswith(f"60 “{tokens[60].text}” → 11 “{tokens[11].text}” 0.769, 0 “<|BOS|>” 0.118, ")
    assert weights[[11, 0]] == pytest.approx([0.769, 0.118], abs=1 / 255)
    shown = highlighted(chromium)
    assert max(shown, key=lambda place: shown[place]) == 11
    assert shown[11] == pytest.approx(weights[11], abs=1 / 255)
    assert max(shown) <= 60
    point_at(chromium, one(chromium, "h1"))
    assert not tip.is_displayed()
    assert highlighted(chromium) == {}


def test_pointing_at_the_matrix_shows_one_weight(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    canvas = one(chromium, ".matrix canvas")
    side = canvas.size["width"] / 101
    weights = attention(2, 8, 101, 50)[1, 6]
    point_at(chromium, canvas, (11 - 50) * side, (60 - 50) * side)
    found = re.fullmatch(r"60 “.*” → 11 “.*”: ([\d.]+)", one(chromium, ".tip").text)
    assert found is not None
    assert float(found[1]) == pytest.approx(weights[60, 11], abs=1 / 255)
    assert one(chromium, ".matrix .cell").is_displayed()
    point_at(chromium, canvas, (80 - 50) * side, (60 - 50) * side)
    assert "cannot see" in one(chromium, ".tip").text


def test_the_matrix_is_painted_by_weight(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    script = """const canvas = document.querySelector(".matrix canvas");
        return Array.from(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data)"""
    pixels = np.array(chromium.execute_script(script)).reshape(101, 101, 4)
    weights = attention(2, 8, 101, 50)[1, 6]
    assert np.abs(pixels[..., 3] / 255 - weights / weights.max()).max() <= 2 / 255


def test_keys_move_between_tokens_and_a_click_keeps_one(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    tokens, tip = chromium.find_elements(By.CSS_SELECTOR, ".tokens li"), one(chromium, ".tip")
    point_at(chromium, tokens[60])
    tokens[60].click()
    point_at(chromium, tokens[11])
    assert re.fullmatch("60 “.*” → 11 “.*”: 0.7.*", tip.text)
    tokens[60].send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("61 “")
    tokens[61].send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert tip.text.startswith("59 “")
    tokens[59].send_keys(Keys.END)
    assert tip.text.startswith("100 “")
    tokens[100].send_keys(Keys.HOME)
    assert tip.text.startswith("0 “")
    assert tokens[0].get_attribute("class") == "present"


def test_another_head_can_be_chosen_by_name_or_on_a_map(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    choice = Select(one(chromium, ".viewer select"))
    assert choice.first_selected_option.text == "1.6"
    choice.select_by_value("0.3")
    point_at(chromium, chromium.find_elements(By.CSS_SELECTOR, ".tokens li")[60])
    assert "→ 59 “" in one(chromium, ".tip").text
    chosen = chromium.find_elements(By.CSS_SELECTOR, "td.chosen")
    assert {cell.get_attribute("data-head") for cell in chosen} == {"0.3"}
    one(chromium, "#model-0-map-induction td[data-head='1.7']").click()
    assert choice.first_selected_option.text == "1.7"
    assert {c.get_attribute("data-head") for c in chromium.find_elements(By.CSS_SELECTOR, "td.chosen")} == {
        "1.7"
    }


def shown_weights(driver: webdriver.Chrome, way: str, row: int) -> dict[int, float]:
    """What the tip says about the strongest sources of a token."""
    one(driver, f"input[value={way}]").click()
    point_at(driver, driver.find_elements(By.CSS_SELECTOR, ".tokens li")[row])
    _, sources = one(driver, ".tip").text.split(" → ")
    return {int(place): float(value) for place, value in re.findall(r"(\d+) “[^”]*” (-?[\d.]+)", sources)}


def test_weights_can_be_scaled_by_value_norms(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path)
    weights = attention(2, 8, 101, 50)[1, 6, 30]
    assert shown_weights(chromium, "plain", 30)[0] == pytest.approx(weights[0], abs=1 / 255)
    scaled = shown_weights(chromium, "weighted", 30)
    assert scaled[29] == pytest.approx(1.5 * weights[29], abs=1.5 / 255 + 1e-3)
    assert scaled[0] == pytest.approx(0.05 * weights[0], abs=1e-3)
    assert one(chromium, ".most").text != "1.00"


def test_value_flow_follows_the_shift_back(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "shifted", tmp_path)
    Select(one(chromium, ".viewer select")).select_by_value("0.3")
    beta = shifted().heads[3].value_shift or []
    weights = np.append(attention(1, 4, 61, 20)[0, 3, 40], 0)
    flow = beta[0] * weights[:41] + beta[1] * weights[1:42]
    found = shown_weights(chromium, "flow", 40)
    assert set(found) == set(np.argsort(-np.abs(flow))[:3].tolist())
    for place, value in found.items():
        assert value == pytest.approx(flow[place], abs=1 / 255 + 1e-3)
    assert console_errors(chromium) == []


def test_value_flow_is_offered_only_where_values_are_shifted(
    chromium: webdriver.Chrome, tmp_path: Path
) -> None:
    open_page(chromium, "two layers", tmp_path)
    assert not chromium.find_elements(By.CSS_SELECTOR, "input[value=flow]")
    made = two_layer()
    mixed = patterns(made, value_shift=[[[] for _ in range(8)], [[0.5, -0.5] for _ in range(8)]])
    write_circuits(report(made), [mixed], tmp_path)
    chromium.refresh()
    one(chromium, "input[value=flow]").click()
    assert one(chromium, ".lowest").text.startswith("-0.")
    Select(one(chromium, ".viewer select")).select_by_value("0.3")
    assert not one(chromium, "input[value=flow]").is_enabled()
    assert one(chromium, "input[value=plain]").is_selected()
    assert one(chromium, ".lowest").text == "0"
    assert console_errors(chromium) == []


# --- hostile, narrow, dark, without a script


def test_text_from_data_stays_text(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    made = two_layer()
    words = {
        "findings": [HOSTILE],
        "notes": [HOSTILE],
        "ablation_method": HOSTILE,
        "previous_token_head": HOSTILE,
    }
    made = made.model_copy(
        update={**words, "facts": made.facts.model_copy(update={"name": HOSTILE, "kind": HOSTILE})}
    )
    tokens = ["<|BOS|>", HOSTILE, "<!--", "<script>", "\u2028", "é🙂"]
    CASES["hostile"] = (report(made, made), [patterns(made, tokens, note=HOSTILE), None])
    try:
        open_page(chromium, "hostile", tmp_path)
    finally:
        del CASES["hostile"]
    shown = [
        token.get_attribute("textContent") for token in chromium.find_elements(By.CSS_SELECTOR, ".tokens li")
    ]
    assert shown == tokens
    assert one(chromium, "#model-0 > h2").text == HOSTILE
    assert chromium.find_element(By.CSS_SELECTOR, ".findings li").text == HOSTILE
    assert not chromium.find_elements(By.CSS_SELECTOR, "img[onerror], img:not([alt])")
    scripts = chromium.find_elements(By.TAG_NAME, "script")
    assert [script.get_attribute("type") for script in scripts] == ["application/json", ""]
    assert console_errors(chromium) == []


def test_no_script_but_the_pages_own_runs(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    write_circuits(*CASES["bare"], tmp_path)
    page = tmp_path / "circuits.html"
    page.write_text(page.read_text().replace("</h1>", "</h1><script>document.title = 'taken'</script>"))
    chromium.get(page.as_uri())
    assert chromium.title == "Circuits: bare"
    assert any("Content Security Policy" in message for message in console_errors(chromium))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [400, 1280])
def test_page_never_scrolls_sideways(
    chromium: webdriver.Chrome, tmp_path: Path, case: str, width: int
) -> None:
    open_page(chromium, case, tmp_path, width)
    for details in chromium.find_elements(By.CSS_SELECTOR, "summary"):
        details.click()
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    assert console_errors(chromium) == []


def test_the_tip_stays_inside_a_narrow_page(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, "two layers", tmp_path, 400)
    for token in chromium.find_elements(By.CSS_SELECTOR, ".tokens li")[:30]:
        point_at(chromium, token)
        box = one(chromium, ".tip").rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 400
        assert box["height"] > 10


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.661, ".66"),
        (-0.004, ".00"),
        (-0.94, "−.94"),
        (0.9949, ".99"),
        (0.996, "1.0"),
        (-9.6, "−9.6"),
        (13.2, "13"),
    ],
)
def test_digits_of_a_cell(value: float, text: str, tmp_path: Path) -> None:
    head = bare().heads[0].model_copy(update={"induction_loss_increase": value})
    write_circuits(report(bare().model_copy(update={"heads": [head]})), [None], tmp_path)
    page = (tmp_path / "circuits.html").read_text()
    assert f'title="head 0.0: {value:+.4f} nats">{text}</td>' in page


def test_twelve_by_twelve_cells_show_their_digits(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    for width in (400, 1280):
        open_page(chromium, "twelve", tmp_path, width)
        script = """return Array.from(document.querySelectorAll(".map td[data-head]"))
            .filter((cell) => cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"""
        assert chromium.execute_script(script) == []


def test_without_a_script_all_but_the_viewer_is_there(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        open_page(chromium, "two layers", tmp_path)
        assert "needs JavaScript" in one(chromium, "#model-0-patterns").text
        assert not one(chromium, ".viewer").is_displayed()
        assert one(chromium, "#model-0-map-induction").is_displayed()
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_the_page_follows_the_readers_colours(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    prefer(chromium, "dark")
    try:
        open_page(chromium, "two layers", tmp_path)
        assert one(chromium, "body").value_of_css_property("background-color") == "rgba(20, 23, 26, 1)"
    finally:
        prefer(chromium, "light")

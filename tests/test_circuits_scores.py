"""Scores of heads: against loops, against what hand-set heads must score, against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny
import torch
import zoo
from handset import one_layer, opened, two_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_circuits_capture import left_padded
from tiny import FEW, Case
from torch import Tensor

from keyshift import KeyshiftForCausalLM, UserError
from keyshift.attention.shift import shift_sequence
from keyshift.circuits import (
    CircuitModel,
    Repeats,
    Vocabulary,
    capture,
    head_scores,
    layer_weights,
    patterns,
    prediction_losses,
    quadrants,
    read_streams,
    repeats,
    sample_repeats,
    value_flow,
    value_weighted,
)
from keyshift.circuits.marks import KINDS, Kind, Marks
from keyshift.circuits.repeats import ordinary_tokens
from keyshift.circuits.results import HeadResult
from keyshift.circuits.scores import strongest, value_weights

CONVENTIONS = ("paper", "arena", "transformer_lens")
Rows = Iterator[tuple[int, list[int]]]

# --- the definitions, once more, as loops over one sequence without padding: counted rows and their sources


def loop(kind: Kind, convention: str, ids: list[int], period: int | None) -> Rows:
    total = len(ids)
    if kind == "previous_token":
        for row in range(total):
            if row or convention == "transformer_lens":
                yield row, [row - 1] if row else []
    elif kind == "first_token":
        for row in range(1 if convention == "paper" else 0, total):
            yield row, [0]
    elif convention == "transformer_lens" or period is None:
        for row in range(total):
            copies = [place for place in range(row) if ids[place] == ids[row]]
            sources = [place + 1 for place in copies] if kind == "induction" else copies
            if sources or convention == "transformer_lens":
                yield row, sources
    elif convention == "arena":
        distance = period - 1 if kind == "induction" else period
        for row in range(distance, total):
            yield row, [row - distance]
    else:
        for row in range(1 + period, total):
            copies = [place for place in range(row - period, 0, -period) if place >= 1]
            yield row, [place + 1 for place in copies] if kind == "induction" else copies


def looped(
    kind: Kind, convention: str, sequences: list[list[int]], period: int | None, pattern: list[Tensor]
) -> float:
    """The mean over counted rows of the weight on their sources; one pattern [T, T] per sequence."""
    rows = [
        float(weights[row, sources].double().sum())
        for ids, weights in zip(sequences, pattern, strict=True)
        for row, sources in loop(kind, convention, ids, period)
    ]
    return sum(rows) / len(rows) if rows else 0.0


def pattern_of(tokens: int, seed: int) -> Tensor:
    """Random causal attention weights [T, T]."""
    scores = 3 * torch.randn(tokens, tokens, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)


@st.composite
def padded_repeats(draw: st.DrawFn) -> tuple[list[list[int]], int | None, list[int]]:
    """Sequences (as text: with tokens that are equal by chance), their period (or None), padding of each."""
    period, copies, count = draw(st.integers(2, 5)), draw(st.integers(2, 3)), draw(st.integers(1, 3))
    distinct = st.lists(st.integers(1, 9), min_size=period, max_size=period, unique=draw(st.booleans()))
    sequences = [[0, *(draw(distinct) * copies)] for _ in range(count)]
    pads = [draw(st.integers(0, 3)) for _ in range(count)]
    return sequences, draw(st.sampled_from((period, None))), pads


@given(padded_repeats(), st.sampled_from(CONVENTIONS), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_marks_are_the_loops(
    case: tuple[list[list[int]], int | None, list[int]], convention: str, seed: int
) -> None:
    sequences, period, pads = case
    if period is None and convention == "arena":
        convention = "paper"
    tokens, total = len(sequences[0]), len(sequences[0]) + max(pads)
    ids, real = torch.zeros(len(pads), total, dtype=torch.long), torch.zeros(len(pads), total).bool()
    whole, alone = torch.rand(len(pads), total, total), []
    for row, (sequence, pad) in enumerate(zip(sequences, pads, strict=True)):
        where = slice(total - tokens - pad, total - pad)  # padding on both sides
        ids[row, where], real[row, where] = torch.tensor(sequence), True
        alone.append(pattern_of(tokens, seed + row))
        whole[row, where, where] = alone[-1]
    marks = Marks(ids, real, convention, period)  # type: ignore[arg-type]
    weights = marks.weights(slice(None))
    halves = torch.cat((marks.weights(slice(0, 4)), marks.weights(slice(4, None))), dim=1)
    assert torch.equal(weights, halves)
    for index, kind in enumerate(KINDS):
        summed = float((whole.double() * weights[..., index]).sum())
        score = summed / max(1, int(marks.counted[kind].sum()))
        assert score == pytest.approx(looped(kind, convention, sequences, period, alone), abs=1e-6), kind


def check_head_scores(model: CircuitModel, sequences: Repeats, pads: list[int]) -> None:
    """Scores and even-spread levels of a real model, with and without padding, against the loops."""
    ids, mask = left_padded(sequences.ids_ST, pads)
    mask = mask & (torch.arange(ids.shape[1]) < sequences.ids_ST.shape[1] + torch.tensor(pads)[:, None])
    tokens = sequences.ids_ST.shape[1]
    alone = patterns(model, sequences.ids_ST)
    lists = sequences.ids_ST.tolist()
    padded = Repeats(ids, sequences.period, sequences.repeats)
    even = torch.ones(tokens, tokens).tril()
    even = even / even.sum(-1, keepdim=True)
    for convention in CONVENTIONS:
        plain = head_scores(model, sequences, convention=convention)  # type: ignore[arg-type]
        moved = head_scores(model, padded, mask, convention=convention)  # type: ignore[arg-type]
        for kind in KINDS:
            level = looped(kind, convention, lists, sequences.period, [even] * len(lists))
            for layer, found in enumerate(model.layers):
                assert plain.levels[layer][kind] == pytest.approx(level, abs=1e-6)
                assert moved.levels[layer][kind] == pytest.approx(level, abs=1e-6)
                for head in range(found.heads):
                    expected = looped(kind, convention, lists, sequences.period, list(alone[layer][:, head]))
                    assert plain.of(kind, layer, head) == pytest.approx(expected, abs=1e-6)
                    assert moved.of(kind, layer, head) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_scores_of_our_models(case: Case) -> None:
    model = CircuitModel(tiny.build(case))
    check_head_scores(model, sample_repeats(model, period=4, sequences=3, bos=1), [2, 0, 5])


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gpt_neox", "phi3"])
def test_scores_of_other_models(name: str) -> None:
    model = CircuitModel(zoo.build(name))
    check_head_scores(model, sample_repeats(model, period=3, repeats=3, sequences=3), [2, 0, 5])


def test_levels_under_a_sliding_window() -> None:
    model = CircuitModel(zoo.build("mistral"))
    sequences = sample_repeats(model, period=3, sequences=2)
    scores = head_scores(model, sequences)
    back = torch.arange(7)[:, None] - torch.arange(7)
    even = ((back >= 0) & (back < 4)).float()
    even = even / even.sum(-1, keepdim=True)
    for kind in KINDS:
        expected = looped(kind, "paper", sequences.ids_ST.tolist(), 3, [even, even])
        assert scores.levels[0][kind] == pytest.approx(expected, abs=1e-6)


def test_scores_of_text() -> None:
    """Equal tokens are copies of each other."""
    model = CircuitModel(zoo.build("gpt2"))
    ids = torch.tensor([[1, 5, 6, 7, 5, 6, 8, 8, 5, 9], [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    alone = patterns(model, ids)
    for convention in ("paper", "transformer_lens"):
        scores = head_scores(model, ids, convention=convention)  # type: ignore[arg-type]
        for kind in KINDS:
            for head in range(4):
                expected = looped(kind, convention, ids.tolist(), None, list(alone[1][:, head]))
                assert scores.of(kind, 1, head) == pytest.approx(expected, abs=1e-6)
                assert expected > 0
    with pytest.raises(UserError, match="arena"):
        head_scores(model, ids, convention="arena")
    with pytest.raises(UserError, match="did you mean 'paper'"):
        head_scores(model, ids, convention="papers")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "shift"])
def test_blocks_and_batches_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CircuitModel(zoo.build(name) if name == "llama" else tiny.build(FEW[0]))
    sequences = sample_repeats(model, period=5, sequences=7, bos=1)
    whole = head_scores(model, sequences)
    losses = prediction_losses(model, sequences.ids_ST)
    monkeypatch.setattr(capture, "BLOCK_BYTES", 4 * 4 * 11 * 3)
    monkeypatch.setattr(repeats, "WATCHED_TOKENS", 22)
    monkeypatch.setattr(repeats, "LOGIT_BYTES", 1)
    pieces = head_scores(model, sequences)
    for layer in (0, 1):
        for kind in KINDS:
            torch.testing.assert_close(pieces.scores[layer][kind], whole.scores[layer][kind])
        flows = whole.induction_flow[layer], pieces.induction_flow[layer]
        assert (flows[0] is None) == (name == "llama")
        if flows[0] is not None:
            torch.testing.assert_close(*flows)
    for found, expected in zip(prediction_losses(model, sequences.ids_ST), losses, strict=True):
        torch.testing.assert_close(found, expected)


# --- heads that are perfect


def test_a_perfect_head_by_each_convention() -> None:
    """On [BOS] + 25 + 25, spreading evenly where there is nothing to find."""
    model = opened(one_layer())
    sequences = sample_repeats(model, period=25, sequences=4)
    scores = [
        head_scores(model, sequences, convention=convention).of("induction", 0, 0)  # type: ignore[arg-type]
        for convention in CONVENTIONS
    ]
    assert [round(score, 3) for score in scores] == [1.000, 0.929, 0.490]
    arena, lens = (25 + 1 / 25 + 1 / 26) / 27, 25 / 51
    assert scores == pytest.approx([1, arena, lens], abs=1e-4)


def perfect(kind: Kind, period: int, tokens: int) -> Tensor:
    """A pattern [T, T] that looks where ``kind`` says, and evenly where there is nothing."""
    pattern = torch.ones(tokens, tokens).tril()
    pattern = pattern / pattern.sum(-1, keepdim=True)
    for row in range(tokens):
        target = {
            "previous_token": row - 1,
            "induction": row - period + 1 if row > period else -1,
            "duplicate_token": row - period if row > period else -1,
            "first_token": 0,
        }[kind]
        if target >= 0:
            pattern[row] = torch.nn.functional.one_hot(torch.tensor(target), tokens)
    return pattern


@pytest.mark.parametrize("kind", KINDS)
@given(period=st.integers(2, 12), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_perfect_heads_score_one(kind: Kind, period: int, seed: int) -> None:
    tokens = 1 + 2 * period
    drawn = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:period] + 1
    ids = torch.cat((torch.zeros(1, dtype=torch.long), drawn, drawn))[None]
    marks = Marks(ids, torch.ones_like(ids).bool(), "paper", period)
    pattern = perfect(kind, period, tokens)
    summed = (pattern * marks.weights(slice(None))[0, ..., KINDS.index(kind)]).sum()
    assert float(summed) / int(marks.counted[kind].sum()) == pytest.approx(1)


def test_a_shifted_layer_completes_repeats_and_one_without_shift_does_not() -> None:
    shifted, plain = opened(one_layer()), opened(one_layer(alpha=(1.0, 0.0)))
    sequences = sample_repeats(shifted, period=12, sequences=8)
    results = {}
    for name, model in (("shifted", shifted), ("plain", plain)):
        loss, right = prediction_losses(model, sequences.ids_ST)
        scores = head_scores(model, sequences)
        results[name] = scores.of("induction", 0, 0), sequences.by_copy(right)[1]
        assert loss.shape == right.shape == (8, 24)
        flow = scores.induction_flow[0]
        assert flow is not None
        assert float(flow) == pytest.approx(results[name][0])  # β = (1, 0): values are the token's own
    assert results["shifted"][0] > 0.99
    assert results["shifted"][1] == 1.0
    assert results["plain"][0] < 1e-3
    assert results["plain"][1] < 0.2


def test_weights_of_the_shifted_layer() -> None:
    model = opened(one_layer())
    weights, vocabulary = layer_weights(model, 0), Vocabulary(model)
    assert vocabulary.matching_through_shift(weights, 0).value == pytest.approx(1)
    assert vocabulary.copying(weights, 0).value == pytest.approx(1)
    direct = vocabulary.direct(weights, 0)  # α1 = 0
    assert direct.zero
    assert direct.value == 0
    assert vocabulary.copied_share(weights, 0, torch.arange(32)) == 1
    head = HeadResult(
        layer=0,
        head=0,
        key_value_head=0,
        previous_token=0,
        induction=1,
        duplicate_token=0,
        first_token=0,
        key_shift=weights.key_shift_HW[0].tolist(),  # type: ignore[index]
        value_shift=weights.value_shift_HW[0].tolist(),  # type: ignore[index]
        induction_loss_increase=3.0,
    )
    for cell in quadrants([head]):
        inside = cell.key_previous and not cell.value_previous
        assert cell.heads == (["0.0"] if inside else [])
        assert (cell.induction, cell.loss_increase) == ((1.0, 3.0) if inside else (None, None))


def test_two_layers_set_by_hand() -> None:
    model = opened(two_layers())
    sequences = sample_repeats(model, period=8, sequences=6)
    scores = head_scores(model, sequences)
    assert scores.of("previous_token", 0, 0) > 0.99
    assert scores.of("induction", 1, 0) > 0.99
    assert strongest(scores, "induction")[0][:2] == (1, 0)
    assert strongest(scores, "previous_token")[0][:2] == (0, 0)
    assert strongest(scores, "induction", layers=[0])[0][0] == 0
    even = looped("induction", "paper", sequences.ids_ST.tolist(), 8, [pattern_even(17)] * 6)
    assert scores.of("induction", 1, 1) == pytest.approx(even, abs=1e-6)  # a zero head spreads evenly
    _, right = prediction_losses(model, sequences.ids_ST)
    assert sequences.by_copy(right)[1] == 1.0


def pattern_even(tokens: int) -> Tensor:
    pattern = torch.ones(tokens, tokens).tril()
    return pattern / pattern.sum(-1, keepdim=True)


# --- where information came from


@given(
    window=st.integers(1, 4),
    tokens=st.integers(1, 6),
    pads=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_value_flow_is_shifting_values(window: int, tokens: int, pads: list[int], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    total, batch, heads = tokens + max(pads), len(pads), 2
    starts = torch.tensor([[pad] * total for pad in pads])
    real = torch.arange(total) >= starts
    pattern = torch.rand(batch, heads, total, total, generator=draw, dtype=torch.float64)
    pattern = (pattern * real[:, None, None]).tril()
    betas = torch.randn(heads, window, generator=draw, dtype=torch.float64)
    values = torch.randn(batch, total, heads, 3, generator=draw, dtype=torch.float64)
    shifted = shift_sequence(values, betas, starts).transpose(1, 2)
    before = pattern.clone()
    flow = value_flow(pattern, betas, real)
    assert torch.equal(pattern, before)
    torch.testing.assert_close(pattern @ shifted, flow @ values.transpose(1, 2))
    assert not bool((flow * ~real[:, None, None]).any())
    if max(pads) == 0:
        assert torch.equal(value_flow(pattern, betas), flow)


@pytest.mark.parametrize("shift_heads", ["kv", "query"])
def test_value_flow_of_a_model(shift_heads: str) -> None:
    """What a head reads, mixed by its flow from raw values, is its result."""
    torch.manual_seed(0)
    model = CircuitModel(KeyshiftForCausalLM(FEW[0].config(shift_heads=shift_heads, shift_window=3)).eval())
    streams = read_streams(model, tiny.tokens(2, 9))
    call, attention = streams.calls[0], model.layers[0].attention
    betas = value_weights(call)
    assert betas is not None
    assert betas.shape == (4, 3)
    _, raw = attention.source.expand(*attention.source.project(streams.normed[0]))  # type: ignore[operator,union-attr]
    raw = raw.transpose(1, 2).repeat_interleave(2, 1)
    flowing = (value_flow(call.pattern(), betas) @ raw).transpose(1, 2)
    torch.testing.assert_close(flowing, call.output_BTHV, rtol=1e-4, atol=1e-5)


def test_no_value_flow_without_a_shift() -> None:
    streams = read_streams(CircuitModel(zoo.build("llama")), tiny.tokens(1, 4))
    assert value_weights(streams.calls[0]) is None


@pytest.mark.parametrize("build", [lambda: zoo.build("llama"), lambda: tiny.build(FEW[3])])
def test_value_weighted(build: Callable[[], torch.nn.Module]) -> None:
    call = read_streams(CircuitModel(build()), tiny.tokens(2, 5)).calls[1]
    found, part = value_weighted(call), value_weighted(call, slice(2, 4))
    assert torch.equal(part, found[:, :, 2:4])
    heads, groups = call.queries_BHTD.shape[1], call.values_BGTV.shape[1]
    pattern = call.pattern()
    for head in range(heads):
        for source in range(5):
            vector = call.values_BGTV[1, head // (heads // groups), source]
            moved = (pattern[1, head, :, source, None] * vector).norm(dim=-1)
            torch.testing.assert_close(found[1, head, :, source], moved)


# --- repeated tokens


@given(period=st.integers(2, 20), repeats=st.integers(2, 4), count=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_repeats(period: int, repeats: int, count: int, seed: int) -> None:
    model = CircuitModel(zoo.build("llama"))
    drawn = sample_repeats(model, period=period, repeats=repeats, sequences=count, seed=seed)
    assert drawn.ids_ST.shape == (count, 1 + period * repeats)
    for ids in drawn.ids_ST.tolist():
        copy = ids[1 : 1 + period]
        assert ids == [1, *(copy * repeats)]
        assert len(set(copy)) == period
        assert not set(copy) & {0, 1, 2}
    again = sample_repeats(model, period=period, repeats=repeats, sequences=count, seed=seed)
    assert torch.equal(again.ids_ST, drawn.ids_ST)
    other = sample_repeats(model, period=20, sequences=4, seed=seed + 1).ids_ST
    assert not torch.equal(other, sample_repeats(model, period=20, sequences=4, seed=seed).ids_ST)


def test_the_papers_slices() -> None:
    """First copy ``loss[:, 1:50]``, second ``loss[:, 51:]`` for n = 50."""
    sequences = Repeats(torch.zeros(2, 101, dtype=torch.long), 50, 2)
    values = torch.rand(2, 100)
    expected = [values[:, 1:50].double().mean(), values[:, 51:].double().mean()]
    assert sequences.by_copy(values) == pytest.approx([float(value) for value in expected])
    three = Repeats(torch.zeros(1, 13, dtype=torch.long), 4, 3)
    assert three.by_copy(torch.arange(12.0)[None]) == [2.0, 6.0, 10.0]


def test_losses_by_hand() -> None:
    model = CircuitModel(zoo.build("gpt2"))
    ids = tiny.tokens(3, 6)
    with torch.no_grad():
        chances = model.module(ids).logits.softmax(-1)
    loss, right = prediction_losses(model, ids)
    for row in range(3):
        for place in range(5):
            answer = int(ids[row, place + 1])
            assert float(loss[row, place]) == pytest.approx(
                -float(chances[row, place, answer].log()), abs=1e-5
            )
            assert bool(right[row, place]) == (int(chances[row, place].argmax()) == answer)


def test_with_replacement_tokens_come_twice() -> None:
    """With n = 50 and V = 1000 tokens, 71% of sequences hold a collision."""
    model = CircuitModel(zoo.fresh("gpt2", vocab_size=1003, bos_token_id=1, eos_token_id=2))
    drawn = sample_repeats(model, period=50, sequences=1000, with_replacement=True)
    collide = sum(len(set(ids[1:51])) < 50 for ids in drawn.ids_ST.tolist()) / 1000
    chance = 1.0
    for taken in range(50):
        chance *= 1 - taken / 1001
    assert collide == pytest.approx(1 - chance, abs=0.05)
    assert 1 - chance == pytest.approx(0.71, abs=0.01)


def test_special_tokens_are_not_drawn() -> None:
    model = CircuitModel(zoo.build("llama"))
    assert ordinary_tokens(model, 1).tolist() == list(range(3, zoo.VOCAB))
    assert ordinary_tokens(model, 7).tolist() == [1, *(each for each in range(3, zoo.VOCAB) if each != 7)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"period": 1}, "period=1 must be at least 2"),
        ({"repeats": 1}, "repeats=1 must be at least 2"),
        ({"sequences": 0}, "sequences=0 must be at least 1"),
        ({"bos": 41}, "bos=41 is outside the vocabulary"),
        ({"bos": -1}, "bos=-1 is outside the vocabulary"),
        ({"period": 39}, "period=39 needs as many different tokens, and x has 38"),
        ({"period": 38, "repeats": 4}, "period=38 × repeats=4 makes sequences of 153 tokens"),
    ],
)
def test_bad_repeats(changes: dict[str, int], message: str) -> None:
    model = CircuitModel(zoo.build("llama"), name="x")
    with pytest.raises(UserError, match=message):
        sample_repeats(model, **changes)  # type: ignore[arg-type]


def test_no_token_to_begin_with() -> None:
    model = CircuitModel(zoo.fresh("llama", bos_token_id=None), name="x")
    with pytest.raises(UserError, match="x has no BOS token"):
        sample_repeats(model, period=4)
    assert sample_repeats(model, period=4, bos=7).ids_ST[0, 0] == 7
    nothing = CircuitModel(zoo.fresh("llama", vocab_size=3), name="x")
    with pytest.raises(UserError, match="x has 0"):
        sample_repeats(nothing, period=4, with_replacement=True)

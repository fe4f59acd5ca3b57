"""The whole analysis, its sentences, prompts, shift weights against behaviour, and the toy circuit."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import tiny
import torch
import zoo
from handset import one_layer, two_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_circuits_capture import words
from tiny import FEW
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import BitNetConfig, BitNetForCausalLM

from keyshift import UserError
from keyshift.circuits import (
    CircuitModel,
    Settings,
    Vocabulary,
    ablate,
    analyse,
    composition,
    correlations,
    head_effects,
    head_scores,
    layer_weights,
    mean_results,
    patterns,
    prediction_losses,
    quadrants,
    read_prompt,
    read_streams,
    sample_repeats,
    toy_circuit,
)
from keyshift.circuits.prompt import repeated_pairs
from keyshift.circuits.results import HeadResult, ModelResult
from keyshift.circuits.shifted import rank_correlation

# --- analyse


def bitnet() -> nn.Module:
    torch.manual_seed(0)
    return BitNetForCausalLM(BitNetConfig(**zoo.SIZES)).eval()


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "two layers": (two_layers, {"period": 8}),
    "one layer": (one_layer, {"period": 10}),
    "gva": (lambda: tiny.build(FEW[4]), {"bos": 1, "heads": ("1.2", "1.0")}),
    "mla": (lambda: tiny.build(FEW[3]), {"bos": 1, "heads": ("1.3",), "fold_norms": False}),
    "gpt2": (lambda: zoo.build("gpt2"), {"convention": "arena", "method": "position_mean"}),
    "llama": (lambda: zoo.build("llama"), {"heads": ("0.1", "1.2"), "repeats": 3, "method": "resample"}),
    "qwen3": (lambda: zoo.build("qwen3"), {"convention": "transformer_lens", "method": "zero"}),
    "bitnet": (bitnet, {"heads": ("1.0",)}),
    "post-LN": (lambda: zoo.fresh("opt", do_layer_norm_before=False), {"heads": ("1.0",)}),
}


def analysed(name: str) -> tuple[CircuitModel, Settings, ModelResult]:
    build, changes = MODELS[name]
    model, chosen = CircuitModel(build(), name=name), Settings(**{"period": 6, "sequences": 5, **changes})
    return model, chosen, analyse(model, chosen)


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_functions(name: str) -> None:
    model, chosen, result = analysed(name)
    assert result.findings
    assert ModelResult.model_validate_json(result.model_dump_json()) == result
    numbers = {key: getattr(chosen, key) for key in ("period", "repeats", "sequences", "seed", "bos")}
    sequences = sample_repeats(model, **numbers)
    loss, right = prediction_losses(model, sequences.ids_ST)
    assert [copy.loss for copy in result.repeats.copies] == sequences.by_copy(loss)
    assert [copy.top1 for copy in result.repeats.copies] == sequences.by_copy(right)
    assert len(result.repeats.loss_by_position) == sequences.ids_ST.shape[1] - 1
    scores = head_scores(model, sequences, convention=chosen.convention)
    assert [head.name for head in result.heads] == model.head_names()
    means = mean_results(model, sequences.ids_ST)
    for head in result.heads:
        place = head.layer, head.head
        assert head.induction == scores.of("induction", *place)
        assert head.previous_token == scores.of("previous_token", *place)
        assert head.duplicate_token == scores.of("duplicate_token", *place)
        assert head.first_token == scores.of("first_token", *place)
        without = ablate(model, sequences, [place], method=chosen.method, means=means)
        expected = without.loss[-1] - sequences.by_copy(loss)[-1]
        assert head.induction_loss_increase == pytest.approx(expected, abs=1e-6)
    chance = torch.tensor(model.vocabulary).double().log()
    assert result.repeats.uniform_loss == pytest.approx(float(chance))
    if chosen.heads:
        assert result.induction_heads == list(chosen.heads)
    assert result.ablations[0].heads == []
    assert result.ablations[0].loss == sequences.by_copy(loss)
    for head in result.induction_heads:
        assert any(each.heads == [head] for each in result.ablations)


@pytest.mark.parametrize("name", ["two layers", "gva", "mla", "llama", "qwen3"])
def test_weights_in_the_result(name: str) -> None:
    model, chosen, result = analysed(name)
    vocabulary = Vocabulary(model, chosen.fold_norms)
    weights = [
        layer_weights(model, layer, offset=chosen.period - 1, fold_norms=chosen.fold_norms)
        for layer in range(len(model.layers))
    ]
    for head in result.heads:
        own = weights[head.layer]
        assert head.ov == vocabulary.copying(own, head.head)
        assert head.direct == vocabulary.direct(own, head.head)
        assert head.key_value_head == head.head // (own.heads // model.layers[head.layer].key_heads)
        assert (head.key_shift is None) == (own.key_shift_HW is None)
        if head.matching_with is not None and head.matching_with.startswith("shift"):
            assert own.key_shift_HW is not None
            later = own.key_shift_HW[head.head, 1:].abs().tolist()
            back = 1 + later.index(max(later))
            assert head.matching_with == ("shift" if back == 1 else f"shift, {back} back")
            assert head.matching == vocabulary.matching_through_shift(own, head.head, back)
        elif head.matching_with is not None:
            layer, other = model.head(head.matching_with)
            assert head.matching == vocabulary.matching(own, head.head, weights[layer], other)
        else:
            assert head.matching is None
    for each in result.compositions:
        layer, head = model.head(each.into)
        assert set(each.scores) == {f"{e}.{h}" for e in range(layer) for h in range(weights[0].heads)}
        for earlier, score in each.scores.items():
            place = model.head(earlier)
            assert score == composition(each.kind, weights[layer], head, weights[place[0]], place[1])
    assert {(lift.head, lift.side) for lift in result.lifts} == {
        (head, side) for head in result.induction_heads for side in ("key", "query")
    }
    assert (result.offset is None) == (name not in ("llama", "qwen3"))
    inner_norm = name in ("gva", "mla", "qwen3")  # of queries, of the latent too, of queries and keys
    assert any("its gain is part of the matrices" in note for note in result.notes) == inner_norm


def test_what_cannot_be_measured_is_noted() -> None:
    for name, note in (("bitnet", "no key lift"), ("post-LN", "no weight measurements")):
        _, _, result = analysed(name)
        assert any(note in each for each in result.notes), result.notes
        assert result.lifts == []
        assert result.heads[0].induction > 0


@pytest.mark.parametrize("name", ["two layers", "gva", "gpt2"])
def test_an_analysis_changes_no_weight_and_can_be_repeated(name: str) -> None:
    build, _ = MODELS[name]
    before = {key: value.clone() for key, value in build().state_dict().items()}
    model, _, first = analysed(name)
    after = model.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    _, _, second = analysed(name)
    first.seconds = second.seconds = 0
    assert first == second


def test_the_hand_set_circuits_are_found() -> None:
    _, _, result = analysed("two layers")
    assert (result.previous_token_head, result.induction_heads) == ("0.0", ["1.0"])
    head = next(each for each in result.heads if each.name == "1.0")
    assert head.matching_with == "0.0"
    assert head.matching is not None
    assert head.ov is not None
    assert head.matching.value == pytest.approx(1)
    assert (head.ov.value, head.copies) == (pytest.approx(1), 1.0)
    by_kind = {each.kind: each for each in result.compositions}
    assert by_kind["K"].scores["0.0"] == pytest.approx(16**-0.5)  # both are of rank 16, and fit
    assert by_kind["K"].scores["0.0"] > 1.5 * by_kind["K"].baseline
    assert by_kind["K"].scores["0.1"] == 0
    assert by_kind["Q"].scores["0.0"] == 0
    text = " ".join(result.findings)
    assert "Head 1.0 completes repeats" in text
    assert "by K-composition" in text
    assert "head 0.0" in text
    broken = {each.role: each for each in result.ablations}
    whole = broken["nothing ablated"]
    assert broken["induction head"].loss[1] > whole.loss[1] + 0.5
    assert broken["previous-token head"].induction["1.0"] < 0.5 < whole.induction["1.0"]
    (parking,) = result.parking
    assert parking.second_copy_target > 0.99

    _, _, result = analysed("one layer")
    assert (result.previous_token_head, result.induction_heads) == (None, ["0.0"])
    assert result.heads[0].matching_with == "shift"
    assert result.compositions == []
    assert "its own shifted key" in " ".join(result.findings)
    assert [q.heads for q in result.quadrants] == [[], [], ["0.0"], []]
    assert (result.quadrants[2].key_previous, result.quadrants[2].value_previous) == (True, False)


def test_no_head_stands_out() -> None:
    model = CircuitModel(zoo.build("llama"))
    result = analyse(model, Settings(period=30, sequences=4))
    assert result.induction_heads == []
    best = max(result.heads, key=lambda head: head.induction)
    assert f"highest score is {best.induction:.3f} (head {best.name})" in result.findings[1]
    assert result.lifts == result.compositions == result.parking == []


def test_with_replacement_where_tokens_are_few() -> None:
    model = CircuitModel(zoo.fresh("llama", vocab_size=8))
    result = analyse(model, Settings(period=12, sequences=3, with_replacement=True, heads=("1.0",)))
    assert result.repeats.with_replacement
    assert result.parking[0].period == 8


BAD: list[tuple[dict[str, Any], str]] = [
    ({"bos": None}, "no BOS token"),
    ({"bos": 99}, "bos=99"),
    ({"period": 1}, "period=1"),
    ({"period": 40}, "period=40"),
    ({"repeats": 1}, "repeats=1"),
    ({"repeats": 30}, "positions for"),
    ({"sequences": 0}, "sequences=0"),
    ({"sequences": 1, "method": "resample"}, "sequences=1: method='resample'"),
    ({"method": "zeros"}, "method='zeros' is not known; did you mean 'zero'"),
    ({"convention": "neel"}, "convention='neel' is not known"),
    ({"heads": ("1.4",)}, "head=4 is out of range"),
    ({"heads": ("2.0",)}, "layer=2 is out of range"),
    ({"heads": ("first",)}, "head='first' must look like 1.6"),
    ({"text": "again and again"}, "text needs a tokenizer"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_are_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    model = CircuitModel(zoo.fresh("llama", bos_token_id=None), name="x")
    passes: list[int] = []
    model.embed.register_forward_hook(lambda *_: passes.append(1))
    chosen = Settings(**{"period": 6, "sequences": 4, "bos": 1, **changes})
    with pytest.raises(UserError) as error:
        analyse(model, chosen)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert passes == []


# --- a text with a repeat in it


def speaking(name: str = "llama", **changes: Any) -> CircuitModel:
    tokenizer = words(zoo.VOCAB, bos_token="w1")
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    return CircuitModel(zoo.fresh(name, **changes), tokenizer, name="x")


TEXT = "w5 w6 w7 w5 w6 w9 w5 w6 w7"


def test_a_prompt_by_hand() -> None:
    model = speaking()
    found = read_prompt(model, TEXT, [(1, 2), (0, 0)])
    ids = torch.tensor([[1, 5, 6, 7, 5, 6, 9, 5, 6, 7]])
    assert torch.equal(model.encode(TEXT), ids)
    assert found.tokens == [f"w{token}" for token in ids[0].tolist()]
    assert [(row.head, row.position) for row in found.rows] == [
        (head, place) for head in ("1.2", "0.0") for place in (4, 7, 8)
    ]
    chances = model.logits(ids).softmax(-1)[0]
    pattern = patterns(model, ids)
    streams = read_streams(model, ids)
    for row in found.rows:
        layer, head = model.head(row.head)
        after = int(ids[0, row.position + 1])
        assert (row.token, row.next_token) == (f"w{int(ids[0, row.position])}", f"w{after}")
        assert row.probability == pytest.approx(float(chances[row.position, after]))
        weights = pattern[layer][0, head, row.position].tolist()
        assert row.weight == pytest.approx(max(weights))
        assert weights[row.reads_position] == pytest.approx(max(weights))
        assert row.reads == f"w{int(ids[0, row.reads_position])}"
        targets = torch.full_like(ids, after)
        effect = head_effects(model, streams, layer, targets)[0, row.position, head]
        assert row.logit == pytest.approx(float(effect))


def test_the_prompt_of_an_analysis() -> None:
    model = speaking()
    result = analyse(model, Settings(period=6, sequences=4, text=TEXT, heads=("1.1",)))
    assert result.prompt == read_prompt(model, TEXT, [(1, 1)])
    for text, message in (
        ("w5 w6 w7", "repeats no pair"),
        (" ".join(["w5 w6"] * 80), "161 tokens are more than x has positions for"),
    ):
        with pytest.raises(UserError, match=message):
            analyse(model, Settings(period=6, sequences=4, text=text))
    # the made-up name is no word of this tokenizer, or too long for the model: a note, no error
    short = speaking(max_position_embeddings=13)
    result = analyse(short, Settings(period=6, sequences=4, heads=("1.1",)))
    assert result.prompt is None
    assert any("no prompt was read" in note for note in result.notes)
    weights = layer_weights(short, 1, offset=5)
    for example in result.copying:
        raised = Vocabulary(short).raised(weights, 1, int(example.token[1:]))
        assert example.raises == [f"w{token}" for token in raised]


@given(st.lists(st.integers(0, 3), max_size=12))
@settings(max_examples=60, deadline=None)
def test_repeated_pairs(ids: list[int]) -> None:
    expected = [
        place
        for place in range(len(ids) - 1)
        if any(ids[before : before + 2] == ids[place : place + 2] for before in range(place))
    ]
    assert repeated_pairs(torch.tensor(ids, dtype=torch.long)) == expected


# --- shift weights against behaviour


def heads_with(*shifts: tuple[float, float, float, float], **measured: list[float]) -> list[HeadResult]:
    return [
        HeadResult(
            layer=0,
            head=index,
            key_value_head=0,
            previous_token=0,
            induction=measured.get("induction", [0.1] * len(shifts))[index],
            duplicate_token=0,
            first_token=0,
            key_shift=list(shift[:2]),
            value_shift=list(shift[2:]),
            shift_set=shifts.index(shift),
            induction_loss_increase=measured.get("loss", [1.0] * len(shifts))[index],
        )
        for index, shift in enumerate(shifts)
    ]


def test_quadrants_by_hand() -> None:
    shared = (0.1, 0.9, 0.8, 0.2)
    heads = heads_with(
        shared, shared, (0.6, 0.4, 0.5, 0.5), (0.9, 0.1, 0.9, 0.1), induction=[0.8, 0.6, 0.2, 0.1]
    )
    table = {(cell.key_previous, cell.value_previous): cell for cell in quadrants(heads)}
    assert table[True, False].heads == ["0.0"]  # shared weights count once
    assert table[True, False].induction == pytest.approx(0.7)
    assert table[False, True].heads == ["0.2"]  # β1 = β2 counts as previous
    assert table[False, False].heads == ["0.3"]
    assert (table[True, True].heads, table[True, True].induction) == ([], None)
    assert quadrants([head.model_copy(update={"value_shift": None}) for head in heads]) == []


def test_correlations_by_hand() -> None:
    shifts = [(0.1, 0.9, 0.8, 0.2), (0.5, 0.5, 0.9, 0.1), (0.7, -0.3, 0.2, 0.8), (0.9, 0.1, 0.5, 0.5)]
    heads = heads_with(*shifts, induction=[0.9, 0.5, 0.3, 0.1], loss=[2.0, 2.0, 2.0, 2.0])
    found = {(each.of, each.against): each for each in correlations(heads)}
    assert set(found) == {
        (of, what) for of in ("key", "value", "both") for what in ("induction", "loss_increase")
    }
    assert found["key", "induction"].rho == pytest.approx(1)  # shares 0.9, 0.5, 0.3, 0.1
    assert found["value", "induction"].rho == pytest.approx(1 - 6 * (1 + 1 + 1 + 1) / (4 * 15))
    # 0.72, 0.45, 0.06, 0.05
    assert found["both", "induction"].rho == pytest.approx(1)
    assert found["key", "loss_increase"].rho is None
    assert all(each.sets == 4 for each in found.values())
    assert correlations(heads[:3]) == []
    twice = [*heads, *(head.model_copy(update={"head": 10 + head.head}) for head in heads)]
    assert correlations(twice) == list(found.values())  # heads that share weights count once
    unknown = [heads[0].model_copy(update={"induction_loss_increase": None}), *heads[1:]]
    assert {each.against for each in correlations(unknown)} == {"induction"}


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=6))
@settings(max_examples=40, deadline=None)
def test_rank_correlation(pairs: list[tuple[int, int]]) -> None:
    """Against ranks counted one by one and every pairing there is."""
    first, second = ([float(pair[side]) for pair in pairs] for side in (0, 1))

    def ranks(values: list[float]) -> list[float]:
        ordered = sorted(values)
        return [
            sum(place for place, each in enumerate(ordered) if each == value) / ordered.count(value)
            for value in values
        ]

    def pearson(x: list[float], y: list[float]) -> float:
        return float(torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1])

    rho, p_value = rank_correlation(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert (rho, p_value) == (None, None)
        return
    expected = pearson(ranks(first), ranks(second))
    assert rho == pytest.approx(expected, abs=1e-9)
    every = [abs(pearson(ranks(first), list(y))) for y in itertools.permutations(ranks(second))]
    exact = sum(each >= abs(expected) - 1e-9 for each in every) / len(every)
    assert p_value == pytest.approx(exact, abs=0.025)


# --- the toy circuit


def test_the_toy_circuit() -> None:
    toy = toy_circuit()
    assert toy.scores_T.tolist() == [0, 4, 0, 0]
    assert [round(weight, 3) for weight in toy.weights_T.tolist()] == [0.017, 0.948, 0.017, 0.017]
    assert torch.equal(toy.term_VV, 4 * torch.eye(3, dtype=torch.float64))
    assert toy.matching.value == 1
    assert toy.logits_V.argmax() == 1
    assert [round(toy.examples[name].value, 2) for name in ("copy", "swap", "mixed")] == [1, 0, 0.33]
    # the same, position by position: b's note says a
    assert toy.stream_TD.tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
    ]
    assert float(toy.weights_T[1]) == pytest.approx(torch.e**4 / (torch.e**4 + 3))


def test_results_are_plain_json() -> None:
    _, _, result = analysed("one layer")
    json.loads(result.model_dump_json(), parse_constant=lambda name: pytest.fail(name))  # no NaN, no Infinity

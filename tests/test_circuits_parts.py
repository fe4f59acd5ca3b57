"""Scores and logits split into parts, and heads taken out: parts add up, and each is what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
import zoo
from handset import one_layer, opened, two_layers
from test_circuits_capture import ids_of, left_padded
from tiny import CASES, FEW, Case
from torch import Tensor, nn

from keyshift import KeyshiftForCausalLM, UserError
from keyshift.circuits import (
    CircuitModel,
    Repeats,
    ablate,
    ablating,
    head_effects,
    head_scores,
    heads_of_key_head,
    lift,
    mean_results,
    prediction_losses,
    read_streams,
    sample_repeats,
)
from keyshift.circuits.effect import piece_effect
from keyshift.circuits.results import LiftResult
from keyshift.circuits.streams import Streams, stream_pieces

ROUNDING = 1e-5
METHODS = ("mean", "position_mean", "zero", "resample")


# --- key lift


def check_sum(model: CircuitModel, found: LiftResult, streams: Streams, sequences: Repeats) -> None:
    """The parts at the target add up to the model's own score there; the residual is rounding."""
    layer, head = model.head(found.head)
    call = streams.calls[layer]
    group = head // (call.queries_BHTD.shape[1] // call.keys_BGTD.shape[1])
    total, rows = 0.0, 0
    n = sequences.period
    visible = call.visible().expand(len(sequences.ids_ST), call.queries_BHTD.shape[1], -1, -1)[:, head]
    for sequence in range(len(sequences.ids_ST)):
        for row in range(1 + n, sequences.ids_ST.shape[1]):
            places = [j for j in range(row - n + 1, 1, -n) if visible[sequence, row, j]]
            if not places:  # all outside the window
                continue
            query = call.queries_BHTD[sequence, head, row].double()
            scores = [float(query @ call.keys_BGTD[sequence, group, j].double()) for j in places]
            total += call.scaling * sum(scores) / len(scores)
            rows += 1
    size = max(1.0, *(abs(part.target) for part in found.parts))
    assert found.score == pytest.approx(total / rows, abs=1e-9)
    assert sum(part.target for part in found.parts) == pytest.approx(found.score, abs=ROUNDING * size)
    assert found.residual < ROUNDING * size
    assert [part.lift for part in found.parts] == sorted((part.lift for part in found.parts), reverse=True)
    assert all(part.lift == pytest.approx(part.target - part.average) for part in found.parts)


def both_sides(model: CircuitModel, layer: int, head: int, sequences: Repeats) -> list[LiftResult]:
    streams = read_streams(model, sequences.ids_ST)
    found = [lift(model, sequences, layer, head, side, streams) for side in ("key", "query")]  # type: ignore[arg-type]
    for each in found:
        check_sum(model, each, streams, sequences)
    return found


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_parts_add_up(name: str) -> None:
    model = CircuitModel(zoo.build(name))
    sequences = sample_repeats(model, period=3, repeats=3, sequences=2)
    for layer, head in ((0, 1), (1, 2)):
        for found in both_sides(model, layer, head, sequences):
            names = {part.name for part in found.parts}
            earlier = {f"0.{index}" for index in range(4)} if layer else set()
            learned = {"position"} if name in ("gpt2", "opt") else set()
            assert {"embedding", *earlier, *learned} <= names
            assert ("mlp 0" in names) == (layer == 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_of_ours_add_up(case: Case) -> None:
    model = CircuitModel(tiny.build(case))
    sequences = sample_repeats(model, period=3, sequences=2, bos=1)
    key, query = both_sides(model, 1, 2, sequences)
    window = case.shift_window
    assert {part.shift for part in key.parts} == set(range(window if "k" in case.shift else 1))
    assert {part.shift for part in query.parts} == set(range(window if case.shifts_query else 1))
    names = {part.name for part in key.parts}
    assert ("position" in names) == (case.position == "learned")
    assert ("mlp 0" in names) == (case.mlp != "none")
    assert ("embedding (rotary)" in names) == (case.position == "decoupled_rope")
    assert all(part.shift == 0 for part in key.parts if "rotary" in part.name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3", "granite"])
def test_parts_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """The residual is the model's own rounding, and granite's factor is seen through it."""
    model, exact = CircuitModel(zoo.fresh(name).to(dtype)), CircuitModel(zoo.fresh(name).to(dtype).float())
    sequences = sample_repeats(model, period=3, sequences=2)
    for side in ("key", "query"):
        found, expected = (lift(each, sequences, 1, 2, side) for each in (model, exact))  # type: ignore[arg-type]
        by_name = {part.name: part for part in expected.parts}
        size = max(1.0, *(abs(part.target) for part in expected.parts))
        step = torch.finfo(dtype).eps
        assert found.residual < 16 * step * size
        for part in found.parts:
            exactly = by_name[part.name].target if part.name != "rounding" else 0
            assert part.target == pytest.approx(exactly, abs=16 * step * size)
    factor = read_streams(model, sequences.ids_ST).factors[0]
    assert factor == pytest.approx(0.3 if name == "granite" else 1, rel=1e-2)


def test_a_window_without_a_target_is_refused() -> None:
    model = CircuitModel(zoo.build("mistral"))
    with pytest.raises(UserError, match="its window is too short"):
        lift(model, sample_repeats(model, period=8, sequences=2, bos=0), 1, 0)


def test_each_part_by_hand() -> None:
    """Grouped heads, shifted keys, no position: every piece through norm, W_K and α by hand."""
    torch.manual_seed(0)
    config = tiny.case("gqa", "none", "kv").config(query_norm=False, shift_window=2, mlp="swiglu")
    inner = KeyshiftForCausalLM(config).eval()
    model = CircuitModel(inner)
    sequences = sample_repeats(model, period=4, sequences=3, bos=1)
    ids, head, n = sequences.ids_ST, 3, 4
    key, query = both_sides(model, 1, head, sequences)
    assert len(key.parts) == 2 * len(query.parts) == 2 * (1 + 4 + 1)

    layers = inner.model.layers
    with torch.no_grad():
        embedded = inner.model.embed_tokens(ids)
        streams = read_streams(model, ids)
        results = streams.calls[0].output_BTHV
        pieces = {"embedding": embedded}
        for index in range(4):
            weight = layers[0].self_attn.o_proj.weight[:, 8 * index : 8 * index + 8]
            pieces[f"0.{index}"] = results[:, :, index] @ weight.T
        middle = embedded + sum(pieces[f"0.{index}"] for index in range(4))
        pieces["mlp 0"] = layers[0].mlp(layers[0].post_attention_layernorm(middle))
        pieces["bias"] = torch.zeros_like(embedded)  # there is none
        whole = sum(pieces.values())
        assert isinstance(whole, Tensor)
        scale = (whole.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        gain = layers[1].input_layernorm.weight
        attention = layers[1].self_attn
        alpha = attention.key_shift.weights()[-1]
        to_key, to_query = attention.source.k_proj.weight[8:], attention.q_proj.weight[24:]
        normed = whole / scale * gain

        def shifted(x: Tensor, back: int) -> Tensor:
            moved = torch.cat((torch.zeros_like(x[:, :back]), x[:, : x.shape[1] - back]), dim=1)
            weights = alpha if alpha.dim() == 1 else alpha[0]
            return moved * weights[back]

        whole_key = sum(shifted(normed @ to_key.T, back) for back in (0, 1))
        for found, side in ((key, "key"), (query, "query")):
            for part in found.parts:
                read = pieces[part.name] / scale * gain
                if side == "key":
                    scores = (normed @ to_query.T) @ shifted(read @ to_key.T, part.shift).mT
                else:
                    scores = (read @ to_query.T) @ whole_key.mT
                scores = scores * config.head_dim**-0.5
                rows = range(1 + n, 1 + 2 * n)
                target = torch.stack([scores[:, row, row - n + 1] for row in rows]).mean()
                average = torch.stack([scores[:, row, : row + 1].mean(-1) for row in rows]).mean()
                assert part.target == pytest.approx(float(target), abs=1e-5), part.name
                assert part.average == pytest.approx(float(average), abs=1e-5), part.name


def test_lift_of_the_hand_set_circuits() -> None:
    model = opened(two_layers())
    key, query = both_sides(model, 1, 0, sample_repeats(model, period=8, sequences=4))
    assert (key.parts[0].name, key.parts[0].shift) == ("0.0", 0)
    assert key.parts[0].lift > 0.99 * sum(part.lift for part in key.parts)
    assert query.parts[0].name == "embedding"
    silent = next(part for part in key.parts if part.name == "0.1")
    assert (silent.target, silent.average) == (0, 0)

    model = opened(one_layer())
    key, query = both_sides(model, 0, 0, sample_repeats(model, period=8, sequences=4))
    assert (key.parts[0].name, key.parts[0].shift) == ("embedding", 1)
    assert [part.lift for part in key.parts[1:]] == [0]
    assert [(part.name, part.shift) for part in query.parts] == [("embedding", 0)]


def test_lift_of_a_head_that_is_not_there() -> None:
    model = CircuitModel(zoo.build("llama"), name="x")
    with pytest.raises(UserError, match="head=4 is out of range: layer 1 of x has heads 0 to 3"):
        lift(model, sample_repeats(model, period=3, sequences=1), 1, 4)


# --- the stream and the logits


def bias_of(model: CircuitModel, ids: Tensor) -> Tensor:
    """What the biases of the final norm and the unembedding add to logits, less its mean."""
    bias = torch.zeros(model.vocabulary, dtype=torch.float64)
    if model.final_norm is not None:
        bias = bias + model.head_module.weight.detach().double() @ model.final_norm.bias_D
    if getattr(model.head_module, "bias", None) is not None:
        bias = bias + model.head_module.bias.detach().double()
    return (bias - bias.mean())[ids] * model.logit_scale


@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, "ours", "ours, tied"])
def test_pieces_add_up_to_the_logits(name: str) -> None:
    if name.startswith("ours"):
        model = CircuitModel(KeyshiftForCausalLM(FEW[2].config(tie_word_embeddings="tied" in name)).eval())
    else:
        model = CircuitModel(zoo.build(name))
    ids = ids_of(model.vocabulary, 2, 6)
    targets = ids_of(model.vocabulary, 2, 12)[:, 6:]
    streams = read_streams(model, ids)
    pieces = stream_pieces(model, streams, len(model.layers))
    torch.testing.assert_close(sum(pieces.values()), streams.last.double(), rtol=1e-4, atol=1e-5)
    total = sum(piece_effect(model, streams, piece, targets) for piece in pieces.values())
    logits = model.logits(ids).double()
    expected = logits.gather(-1, targets[..., None])[..., 0] - logits.mean(-1)
    torch.testing.assert_close(total + bias_of(model, targets), expected, rtol=1e-4, atol=1e-4)
    for head, effect in enumerate(head_effects(model, streams, 1, targets).unbind(-1)):
        torch.testing.assert_close(effect, piece_effect(model, streams, pieces[f"1.{head}"], targets))


def test_logits_that_are_scaled_or_capped() -> None:
    assert CircuitModel(zoo.build("llama")).logit_scale == 1
    assert CircuitModel(zoo.build("cohere")).logit_scale == pytest.approx(zoo.config("cohere").logit_scale)
    assert CircuitModel(zoo.build("granite")).logit_scale == pytest.approx(
        1 / zoo.config("granite").logits_scaling
    )
    assert CircuitModel(zoo.fresh("gemma2", final_logit_softcapping=0.5)).logit_scale == 1


@pytest.mark.parametrize("name", ["llama", "granite", "gpt2"])
def test_a_heads_effect_is_what_its_absence_takes_away(name: str) -> None:
    """With the scale of the final norm as it was; what the head wrote is had from its o_proj by hand."""
    inner = zoo.build(name)
    model = CircuitModel(inner)
    ids, targets = ids_of(zoo.VOCAB, 2, 6), ids_of(zoo.VOCAB, 2, 12)[:, 6:]
    streams = read_streams(model, ids)
    final = inner.transformer.ln_f if name == "gpt2" else inner.model.norm
    centred = streams.last - streams.last.mean(-1, keepdim=True) if name == "gpt2" else streams.last
    scale = (centred.square().mean(-1, keepdim=True) + (1e-5 if name == "gpt2" else 1e-6)).sqrt()
    effects = head_effects(model, streams, 1, targets)
    for head in range(4):
        results = streams.calls[1].output_BTHV[:, :, head]
        if name == "gpt2":
            wrote = results @ inner.transformer.h[1].attn.c_proj.weight[4 * head : 4 * head + 4]
            wrote = wrote - wrote.mean(-1, keepdim=True)
        else:
            wrote = results @ inner.model.layers[1].self_attn.o_proj.weight[:, 4 * head : 4 * head + 4].T
            wrote = wrote * (0.3 if name == "granite" else 1)
        logits = (wrote / scale * final.weight) @ inner.lm_head.weight.T
        logits = logits / (2 if name == "granite" else 1)
        expected = logits.gather(-1, targets[..., None])[..., 0] - logits.mean(-1)
        torch.testing.assert_close(effects[..., head].float(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_what_granite_multiplies_is_seen() -> None:
    """Its residual multiplier is 0.3: so much of what a head wrote is in the stream, the MLP's alike."""
    inner = zoo.build("granite")
    model = CircuitModel(inner)
    streams = read_streams(model, ids_of(zoo.VOCAB, 1, 6))
    assert streams.factors == pytest.approx([0.3, 0.3], rel=1e-4)
    layer = inner.model.layers[0]
    with torch.no_grad():
        middle = streams.before[0] + 0.3 * streams.attended[0]
        mlp = 0.3 * layer.mlp(layer.post_attention_layernorm(middle))
    torch.testing.assert_close(stream_pieces(model, streams, 1)["mlp 0"].float(), mlp, rtol=1e-3, atol=1e-5)
    for name in ("llama", "gemma2", "gpt_neox", "cohere"):
        assert read_streams(CircuitModel(zoo.build(name)), ids_of(zoo.VOCAB, 1, 6)).factors == [1, 1]


# --- ablation

PROJECTIONS = {"gpt2": "c_proj", "opt": "out_proj", "gpt_neox": "dense"}
BROKEN = ["gpt2", "llama", "gemma2", "gpt_neox", "opt", "deepseek_v3", "gpt_oss", *FEW[:5]]


def model_of(which: str | Case) -> CircuitModel:
    return CircuitModel(zoo.build(which) if isinstance(which, str) else tiny.build(which))


def projection(model: CircuitModel, which: str | Case, layer: int) -> nn.Module:
    name = PROJECTIONS.get(which, "o_proj") if isinstance(which, str) else "o_proj"
    return model.layers[layer].attention.get_submodule(name)


@contextmanager
def hook(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Within, the module's input is what ``change`` makes of it."""
    handle = module.register_forward_pre_hook(
        lambda _, args: None if (new := change(args[0])) is None else (new,)
    )
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("which", BROKEN, ids=str)
def test_taking_a_head_out_is_replacing_its_columns(which: str | Case, method: Any) -> None:
    """Every head, by a hook on the input of the output projection; and every one changes the logits."""
    model = model_of(which)
    ids = ids_of(model.vocabulary, 3, 7)
    plain, means = model.logits(ids), mean_results(model, ids)
    for layer in (0, 1):
        module, inputs = projection(model, which, layer), []
        with hook(module, lambda x, inputs=inputs: inputs.append(x.clone())):  # type: ignore[misc]
            model.logits(ids)
        clean = inputs[0].detach()
        width = clean.shape[-1] // model.layers[layer].heads
        stand_in = {
            "mean": clean.mean((0, 1)).expand_as(clean),
            "position_mean": clean.mean(0).expand_as(clean),
            "zero": torch.zeros_like(clean),
            "resample": clean[[2, 0, 1]],
        }[method]
        for head in range(model.layers[layer].heads):
            columns = slice(head * width, head * width + width)

            def change(x: Tensor, columns: slice = columns, stand_in: Tensor = stand_in) -> Tensor:
                x = x.clone()
                x[..., columns] = stand_in[..., columns]
                return x

            with hook(module, change):
                expected = model.logits(ids)
            found = model.logits(ids, observer=ablating(model, [(layer, head)], method, means))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert float((found - plain).abs().max()) > 1e-4


def test_several_heads_in_several_layers() -> None:
    model = model_of("llama")
    ids = ids_of(zoo.VOCAB, 2, 7)
    inner = zoo.fresh("llama")
    with torch.no_grad():
        inner.model.layers[0].self_attn.o_proj.weight[:, 4:12] = 0
        inner.model.layers[1].self_attn.o_proj.weight[:, :4] = 0
        expected = inner(ids).logits
    found = model.logits(ids, observer=ablating(model, [(0, 1), (1, 0), (0, 2)], "zero"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.logits(ids, observer=ablating(model, [], "zero")), model.logits(ids))


def test_a_key_head_is_its_query_heads() -> None:
    """Values of a key/value head set to zero in the weights: the results of its query heads are zero."""
    model = model_of("llama")
    assert [heads_of_key_head(model, 1, group) for group in (0, 1)] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)]]
    ids = ids_of(zoo.VOCAB, 2, 7)
    for group in (0, 1):
        inner = zoo.fresh("llama")
        with torch.no_grad():
            inner.model.layers[1].self_attn.v_proj.weight[4 * group : 4 * group + 4] = 0
            expected = inner(ids).logits
        found = model.logits(ids, observer=ablating(model, heads_of_key_head(model, 1, group), "zero"))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert float((found - model.logits(ids)).abs().max()) > 1e-3
    for group in (-1, 2):
        with pytest.raises(UserError, match=f"key_head={group} is out of range"):
            heads_of_key_head(model, 1, group)


@pytest.mark.parametrize("pads", [[0, 0, 0], [2, 0, 4], [1, 1, 2]])
@pytest.mark.parametrize("which", ["llama", "gpt2", FEW[0]], ids=str)
def test_means_leave_padding_out(which: str | Case, pads: list[int]) -> None:
    model = model_of(which)
    sequences = ids_of(31, 3, 5)
    ids, mask = left_padded(sequences, pads)
    mask = mask & (torch.arange(ids.shape[1]) < 5 + torch.tensor(pads)[:, None])
    found = mean_results(model, ids, mask)
    for layer in (0, 1):
        alone = [read_streams(model, each[None]).calls[layer].output_BTHV[0].double() for each in sequences]
        whole = torch.cat(alone).mean(0)
        torch.testing.assert_close(found.mean[layer], whole, rtol=1e-4, atol=1e-6)
        for slot in range(ids.shape[1]):
            there = [alone[row][slot - pad] for row, pad in enumerate(pads) if 0 <= slot - pad < 5]
            expected = torch.stack(there).mean(0) if there else torch.zeros_like(whole)
            torch.testing.assert_close(found.position_mean[layer][slot], expected, rtol=1e-4, atol=1e-6)


def test_ablation_of_the_hand_set_circuit() -> None:
    """Without either head of the pair the repeat is lost; the zero heads do not matter."""
    model = opened(two_layers())
    sequences = sample_repeats(model, period=8, sequences=64)
    means = mean_results(model, sequences.ids_ST)

    def without(*heads: tuple[int, int], method: Any = "mean") -> Any:
        return ablate(model, sequences, heads, role="x", method=method, means=means, watched=[(1, 0)])

    whole = without()
    assert (whole.heads, whole.role, whole.top1[1]) == ([], "x", 1.0)
    assert whole.induction["1.0"] > 0.99
    loss, right = prediction_losses(model, sequences.ids_ST)
    assert whole.loss == sequences.by_copy(loss)
    assert whole.top1 == sequences.by_copy(right)
    scores = head_scores(model, sequences)
    assert whole.induction == {"1.0": scores.of("induction", 1, 0)}
    for method in METHODS:
        first, second = without((0, 0), method=method), without((1, 0), method=method)
        assert first.heads == ["0.0"]
        assert first.induction["1.0"] < 0.3
        assert second.induction["1.0"] == whole.induction["1.0"]  # it looks as before, and writes nothing
        for broken in (first, second):
            assert broken.top1[1] < 0.5
            assert broken.loss[1] > whole.loss[1] + 0.5
        assert without((0, 1), (1, 1), method=method).loss == whole.loss


def test_resampling_long_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few sequences fit at a time, there is another one to take results from."""
    monkeypatch.setattr("keyshift.circuits.repeats.WATCHED_TOKENS", 1)
    monkeypatch.setattr("keyshift.circuits.repeats.LOGIT_BYTES", 1)
    model = model_of("llama")
    sequences = sample_repeats(model, period=4, sequences=5)
    found = ablate(model, sequences, [(0, 0)], method="resample", watched=[(1, 0)])
    assert found.induction["1.0"] != head_scores(model, sequences).of("induction", 1, 0)


def test_bad_ablations() -> None:
    model = CircuitModel(zoo.build("llama"), name="x")
    ids = ids_of(zoo.VOCAB, 1, 7)
    means = mean_results(model, ids)
    bad: list[tuple[Any, str]] = [
        (lambda: ablating(model, [(0, 0)], "means"), "method='means' is not known; did you mean 'mean'"),  # type: ignore[arg-type]
        (lambda: ablating(model, [(0, 0)], "mean"), "method='mean' needs means"),
        (lambda: ablating(model, [(2, 0)], "zero"), "layer=2 is out of range"),
        (lambda: ablating(model, [(0, -1)], "zero"), "head=-1 is out of range"),
        (
            lambda: model.logits(ids, observer=ablating(model, [(0, 0)], "resample")),
            "method='resample' needs at least two sequences",
        ),
        (
            lambda: model.logits(ids[:, :5], observer=ablating(model, [(0, 0)], "position_mean", means)),
            "means of 7 positions, and these sequences have 5",
        ),
    ]
    for call, message in bad:
        with pytest.raises(UserError, match=message):
            call()

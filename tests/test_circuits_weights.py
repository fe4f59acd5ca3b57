"""Matrices of heads against parameters laid out by hand, eigenvalues and composition against whole tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import zoo
from handset import opened, two_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_circuits_capture import ids_of
from tiny import FEW, case
from torch import Tensor, nn
from transformers import BitNetConfig, BitNetForCausalLM

from keyshift import KeyshiftForCausalLM, UserError
from keyshift.circuits import (
    CircuitModel,
    Vocabulary,
    composition,
    layer_weights,
    lift,
    positivity,
    random_composition,
    read_streams,
    sample_repeats,
)
from keyshift.circuits.norms import read_norm
from keyshift.circuits.streams import head_writes, stream_pieces
from keyshift.circuits.weights import LayerWeights, embedding, unembedding

OFFSET = 3


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected.detach().double(), rtol=1e-5, atol=1e-6)


def by_head(weight: Tensor, heads: int) -> Tensor:
    """The weight [H·N, D] of a linear layer as matrices [H, D, N] that rows are multiplied with."""
    return weight.detach().double().unflatten(0, (heads, -1)).mT


def turned(matrix_XN: Tensor, position: int, width: int | None = None, theta: float = 10000.0) -> Tensor:
    """RoPE at a position on the last dimension (halves), on its first ``width`` columns."""
    width = matrix_XN.shape[-1] if width is None else width
    angles = position * theta ** (-torch.arange(0, width, 2).double() / width)
    first, second = matrix_XN[..., : width // 2], matrix_XN[..., width // 2 : width]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, matrix_XN[..., width:]), dim=-1)


def check(
    found: LayerWeights, query_HDN: Tensor, key_GDN: Tensor, value_GDM: Tensor, output_HMD: Tensor
) -> None:
    close(found.query_HDN, query_HDN)
    close(found.key_GDN, key_GDN)
    close(found.value_GDM, value_GDM)
    close(found.output_HMD, output_HMD)
    for head in range(found.heads):
        group = head // (found.heads // len(key_GDN))
        close(found.qk(head)[0] @ found.qk(head)[1].T, query_HDN[head] @ key_GDN[group].T)
        group = head // (found.heads // len(value_GDM))
        close(found.ov(head)[0] @ found.ov(head)[1], value_GDM[group] @ output_HMD[head])


# --- other libraries' layouts


@pytest.mark.parametrize("fold", [True, False])
def test_gpt2(fold: bool) -> None:
    model = zoo.build("gpt2")
    block = model.transformer.h[1]
    found = layer_weights(CircuitModel(model), 1, fold_norms=fold)
    query, key, value = block.attn.c_attn.weight.detach().double().split(16, dim=1)
    matrices = [part.unflatten(1, (4, 4)).transpose(0, 1) for part in (query, key, value)]
    if fold:
        gain = block.ln_1.weight.detach().double()[:, None]
        centre = torch.eye(16, dtype=torch.float64) - 1 / 16
        matrices = [centre @ (gain * matrix) for matrix in matrices]
    check(found, *matrices, block.attn.c_proj.weight.detach().double().unflatten(0, (4, 4)))
    assert (found.offset, found.unscaled, found.rotary_key_GDR) == (None, False, None)
    assert (found.alpha(0, 0), found.alpha(0, 1), found.beta(0, 0), found.beta(0, 1)) == (1, 0, 1, 0)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("offset", [0, OFFSET])
def test_grouped_heads_with_rotation(name: str, fold: bool, offset: int) -> None:
    model = zoo.build(name)
    layer = model.model.layers[1]
    attention = layer.self_attn
    found = layer_weights(CircuitModel(model), 1, offset=offset, fold_norms=fold)
    query, key, value = (
        by_head(projection.weight, count)
        for projection, count in ((attention.q_proj, 4), (attention.k_proj, 2), (attention.v_proj, 2))
    )
    gain = layer.input_layernorm.weight.detach().double()[:, None] if fold else 1
    check(
        found,
        gain * turned(query, offset),
        gain * key,
        gain * value,
        attention.o_proj.weight.detach().double().T.unflatten(0, (4, 4)),
    )
    assert found.offset == offset
    with pytest.raises(UserError, match="needs an offset"):
        layer_weights(CircuitModel(model), 1)


def test_gpt_neox() -> None:
    """Fused and interleaved by head, half of each head rotated."""
    model = zoo.build("gpt_neox")
    attention = model.gpt_neox.layers[0].attention
    fused = by_head(attention.query_key_value.weight, 4)
    query, key, value = fused.split(4, dim=-1)
    found = layer_weights(CircuitModel(model), 0, offset=OFFSET, fold_norms=False)
    output = attention.dense.weight.detach().double().T.unflatten(0, (4, 4))
    check(found, turned(query, OFFSET, width=2), key, value, output)


def test_norms_after_attention() -> None:
    """OLMo 2 has no norm before attention, and one after; its norms of queries and keys are gains."""
    model = zoo.build("olmo2")
    layer = model.model.layers[1]
    attention = layer.self_attn
    found = layer_weights(CircuitModel(model), 1, offset=0)
    assert found.unscaled
    query = by_head(attention.q_norm.weight[:, None] * attention.q_proj.weight, 4)
    key = by_head(attention.k_norm.weight[:, None] * attention.k_proj.weight, 2)
    gain = layer.post_attention_layernorm.weight.detach().double()
    output = attention.o_proj.weight.detach().double().T.unflatten(0, (4, 4)) * gain
    check(found, query, key, by_head(attention.v_proj.weight, 2), output)


# --- ours


def ours(attention: str, position: str, shift: str = "none", **changes: Any) -> tuple[CircuitModel, Any]:
    torch.manual_seed(0)
    config = case(attention, position, shift).config(**{"query_norm": False, **changes})
    model = KeyshiftForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "shift" not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return CircuitModel(model), model.model.layers[1]


def rows(layer: Any, fold: bool) -> Tensor:
    gain = layer.input_layernorm.weight.detach().double()
    return gain[:, None] if fold else torch.ones_like(gain)[:, None]


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("attention", ["mha", "gqa", "mqa"])
def test_projected_keys(attention: str, fold: bool) -> None:
    model, layer = ours(attention, "rope", "kv")
    module, gain = layer.self_attn, rows(layer, fold)
    groups = {"mha": 4, "gqa": 2, "mqa": 1}[attention]
    found = layer_weights(model, 1, offset=OFFSET, fold_norms=fold)
    key = gain * by_head(module.source.k_proj.weight, groups)
    value = gain * by_head(module.source.v_proj.weight, groups)
    query = gain * turned(by_head(module.q_proj.weight, 4), OFFSET, theta=model.config.rope_theta)
    output = module.o_proj.weight.detach().double().T.unflatten(0, (4, -1))
    close(found.output_HMD, output)
    for head in range(4):
        group = head // (4 // groups)
        close(found.qk(head)[0] @ found.qk(head)[1].T, query[head] @ key[group].T)
        close(found.ov(head)[0] @ found.ov(head)[1], value[group] @ output[head])


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("attention", ["gva", "shared_kv"])
@pytest.mark.parametrize("position", ["none", "alibi", "learned"])
@pytest.mark.parametrize("normed", [True, False])
def test_keys_from_values(attention: str, position: str, normed: bool, fold: bool) -> None:
    """W_QK = W_Q M^T W_V^T; shared keys have M = 1; the norm of the values is its gain."""
    model, layer = ours(attention, position, stream_norm=normed)
    module, gain = layer.self_attn, rows(layer, fold)
    found = layer_weights(model, 1, fold_norms=fold)
    assert found.unscaled == normed
    value = gain * by_head(module.source.v_proj.weight, 2)
    if normed:
        value = value * module.source.norm.weight.detach().double().view(2, 1, 8)
    query = gain * by_head(module.q_proj.weight, 4)
    for head in range(4):
        key_map = module.source.key_map[head].detach().double() if attention == "gva" else torch.eye(8)
        close(found.qk(head)[0] @ found.qk(head)[1].T, query[head] @ key_map.double().T @ value[head // 2].T)
        close(found.ov(head)[0], value[head // 2])
    assert found.offset is None


@pytest.mark.parametrize("fold", [True, False])
def test_keys_from_a_latent(fold: bool) -> None:
    """W_QK = W_Q W_UK^T W_DKV^T, the latent's norm as its gain; the rotary part stands apart."""
    model, layer = ours("mla", "decoupled_rope", rope_allocation="additive", stream_norm=True)
    module, gain = layer.self_attn, rows(layer, fold)
    found = layer_weights(model, 1, offset=OFFSET, fold_norms=fold)
    assert found.unscaled
    down = module.source.down_proj.weight.detach().double().T * module.source.norm.weight.detach().double()
    up, value = by_head(module.source.key_up.weight, 4), by_head(module.source.value_up.weight, 4)
    query = gain * by_head(module.q_proj.weight, 4)
    content = query.shape[-1] - 4
    for head in range(4):
        close(
            found.qk(head)[0] @ found.qk(head)[1].T,
            query[head, :, :content] @ up[head].T @ (gain * down).T,
        )
        close(
            found.ov(head)[0] @ found.ov(head)[1],
            gain * down @ value[head] @ module.o_proj.weight.detach().double().T.unflatten(0, (4, -1))[head],
        )
    assert found.rotary_query_HDR is not None
    assert found.rotary_key_GDR is not None
    close(found.rotary_query_HDR, turned(query[..., content:], OFFSET, theta=model.config.rope_theta))
    close(found.rotary_key_GDR, (gain * module.rope_key.weight.detach().double().T).expand(4, -1, -1))
    assert found.offset is None  # the content does not know positions
    close(layer_weights(model, 1, fold_norms=fold).query_HDN, query[..., :content])


@pytest.mark.parametrize("shift_heads", ["kv", "query"])
@pytest.mark.parametrize("shift_weights", ["free", "gate"])
def test_shift_weights_of_every_query_head(shift_heads: str, shift_weights: str) -> None:
    model, layer = ours(
        "gqa", "none", "kv", shift_heads=shift_heads, shift_weights=shift_weights, shift_window=3
    )
    found, plain = layer_weights(model, 1), layer_weights(ours("gqa", "none")[0], 1)
    module = layer.self_attn
    for name, shift in (("key", module.key_shift), ("value", module.value_shift)):
        weights = getattr(found, f"{name}_shift_HW")
        own = shift.weights().double()
        close(weights, own if shift_heads == "query" else own[[0, 0, 1, 1]])
    assert found.alpha(3, 2) == pytest.approx(module.key_shift.weights()[-1, 2].item())
    assert found.beta(0, 1) == pytest.approx(module.value_shift.weights()[0, 1].item())
    assert found.alpha(3, 3) == 0
    assert plain.key_shift_HW is None
    # the matrices themselves are those of the raw keys and values, one per group that has its own shift
    value = by_head(module.source.v_proj.weight, 2)
    for head in range(4):
        close(found.ov(head)[0], rows(layer, True) * value[head // 2])


# --- against what the model does


NO_INNER_NORM = [
    name for name in zoo.ARCHITECTURES if name not in ("qwen3", "gemma3", "olmo2", "deepseek_v3")
]


@pytest.mark.parametrize("name", NO_INNER_NORM)
def test_scores_from_matrices_are_the_models(name: str) -> None:
    """(x_i W_Q) · (x_j W_K) at i - j = offset, with normalised streams and without biases."""
    model = zoo.fresh(name)
    opened = CircuitModel(model)
    with torch.no_grad():
        for layer in opened.layers:
            for parameter_name, parameter in layer.attention.named_parameters():
                if parameter_name.endswith("bias"):
                    parameter.zero_()
    streams = read_streams(opened, ids_of(zoo.VOCAB, 2, 9))
    for index, call in enumerate(streams.calls):
        weights = layer_weights(opened, index, offset=OFFSET, fold_norms=False)
        x = streams.normed[index].double()
        for head in range(4):
            group = head // (4 // opened.layers[index].key_heads)
            query, key = weights.qk(head)
            keys = call.keys_BGTD[:, group].double()
            own = (call.queries_BHTD[:, head, OFFSET:].double() * keys[:, :-OFFSET]).sum(-1)
            mine = ((x[:, OFFSET:] @ query) * (x[:, :-OFFSET] @ key)).sum(-1)
            torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)


def test_folded_norms_read_the_raw_stream() -> None:
    """With the scales of both tokens put back, the folded matrices give the score."""
    for name in ("llama", "gpt2"):
        model = CircuitModel(zoo.build(name))
        streams = read_streams(model, ids_of(zoo.VOCAB, 1, 6))
        folded = layer_weights(model, 1, offset=0).query_HDN[2]
        plain = layer_weights(model, 1, offset=0, fold_norms=False).query_HDN[2]
        norm = model.layers[1].norm
        assert norm is not None
        x = streams.before[1].double()
        moved = x - x.mean(-1, keepdim=True) if name == "gpt2" else x
        scale = (moved.square().mean(-1, keepdim=True) + (1e-5 if name == "gpt2" else 1e-6)).sqrt()
        expected = (streams.normed[1].double() - norm.bias_D) @ plain
        torch.testing.assert_close(x @ folded / scale, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_heads_add_up_to_what_attention_writes(name: str) -> None:
    """Results through each head's W_O, and the module's output: the same but for a bias."""
    opened = CircuitModel(zoo.build(name))
    streams = read_streams(opened, ids_of(zoo.VOCAB, 2, 7))
    for index in (0, 1):
        wrote = head_writes(opened, streams, index)
        assert wrote.shape == (2, 7, 4, 16)
        rest = streams.written[index].double() - wrote.sum(2)
        name_of_bias = {"gpt2": "c_proj", "gpt_neox": "dense", "opt": "out_proj", "gpt_oss": "o_proj"}.get(
            name
        )
        bias = torch.zeros(16)
        if name_of_bias is not None:
            bias = opened.layers[index].attention.get_submodule(name_of_bias).bias.detach()
            assert float(bias.abs().min()) > 0
        torch.testing.assert_close(rest, bias.double().expand_as(rest), rtol=0, atol=1e-5)


def test_one_head_through_an_output_projection_that_is_not_diagonal() -> None:
    for model in (zoo.build("llama"), tiny.build(FEW[0])):
        opened = CircuitModel(model)
        streams = read_streams(opened, tiny.tokens(2, 7))
        projection = opened.layers[1].attention.o_proj.weight.double()  # type: ignore[union-attr,operator]
        results = streams.calls[1].output_BTHV.double()
        width = results.shape[-1]
        for head in range(4):
            expected = results[:, :, head] @ projection[:, head * width : (head + 1) * width].T
            torch.testing.assert_close(head_writes(opened, streams, 1)[:, :, head], expected.detach())


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_embeddings(name: str, fold: bool) -> None:
    model = zoo.build(name)
    opened = CircuitModel(model)
    matrix = model.get_output_embeddings().weight.double()
    if fold and name == "gpt2":
        matrix = matrix * model.transformer.ln_f.weight.double()
        matrix = matrix - matrix.mean(-1, keepdim=True)
    elif fold:
        matrix = matrix * (model.model.norm.weight.double() + (1 if name == "gemma2" else 0))
    close(unembedding(opened, fold), matrix)
    close(embedding(opened), model.get_input_embeddings().weight)


# --- what is no matrix


def test_heads_behind_a_norm_or_a_gate_are_refused() -> None:
    torch.manual_seed(0)
    normed = CircuitModel(BitNetForCausalLM(BitNetConfig(**zoo.SIZES)).eval(), name="x")
    assert layer_weights(normed, 0, offset=1).unscaled
    streams = read_streams(normed, ids_of(zoo.VOCAB, 1, 5))
    with pytest.raises(UserError, match="more to its heads' results than project them"):
        head_writes(normed, streams, 0)

    class Gated(type(zoo.build("llama").model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            output, weights = super().forward(hidden_states, **kwargs)
            return output * hidden_states.mean(-1, keepdim=True).sigmoid(), weights

    model = zoo.fresh("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Gated
    with pytest.raises(UserError, match="gates what its heads write"):
        layer_weights(CircuitModel(model, name="x"), 1, offset=1)


def test_a_query_that_is_not_linear_is_refused() -> None:
    model = zoo.fresh("llama")

    class Bent(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).tanh()

    model.model.layers[1].self_attn.q_proj.__class__ = Bent
    with pytest.raises(UserError, match="the query of x is not linear"):
        layer_weights(CircuitModel(model, name="x"), 1, offset=1)


def test_a_stream_that_is_normalised_itself_is_refused() -> None:
    model = CircuitModel(zoo.fresh("opt", do_layer_norm_before=False), name="x")
    assert layer_weights(model, 1, fold_norms=False).heads == 4
    sequences = sample_repeats(model, period=4, sequences=2)
    for call in (
        lambda: layer_weights(model, 1),
        lambda: lift(model, sequences, 1, 0),
        lambda: stream_pieces(model, read_streams(model, sequences.ids_ST), 1),
    ):
        with pytest.raises(UserError, match="post-LN"):
            call()


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there(layer: int) -> None:
    with pytest.raises(UserError, match=f"layer={layer} is out of range: x has layers 0 to 1"):
        layer_weights(CircuitModel(zoo.build("gpt2"), name="x"), layer)


# --- eigenvalues


def full_positivity(table: Tensor) -> float:
    values = torch.linalg.eigvals(table)
    return float(values.real.sum() / values.abs().sum())


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "deepseek_v3", "ours"])
def test_positivity_of_the_whole_table(name: str, fold: bool) -> None:
    """The V × V table has the eigenvalues of the small product."""
    model = CircuitModel(tiny.build(FEW[0]) if name == "ours" else zoo.build(name))
    first, second = (layer_weights(model, index, offset=OFFSET, fold_norms=fold) for index in (0, 1))
    vocabulary = Vocabulary(model, fold)
    embed, unembed = embedding(model), unembedding(model, fold)
    for head in range(4):
        into, out = second.ov(head)
        query, key = second.qk(head)
        earlier_in, earlier_out = first.ov(3 - head)
        shift = 1.0 if second.key_shift_HW is None else float(second.key_shift_HW[head, 0])
        back = 0.0 if second.key_shift_HW is None else float(second.key_shift_HW[head, 1])
        beta = 1.0 if second.value_shift_HW is None else float(second.value_shift_HW[head, 0])
        copying = vocabulary.copying(second, head)
        assert copying.value == pytest.approx(
            full_positivity(beta * embed @ into @ out @ unembed.T), abs=1e-7
        )
        assert copying.condition >= 1
        direct = full_positivity(shift * embed @ query @ key.T @ embed.T)
        assert vocabulary.direct(second, head).value == pytest.approx(direct, abs=1e-7)
        term = embed @ query @ key.T @ (embed @ earlier_in @ earlier_out).T
        found = vocabulary.matching(second, head, first, 3 - head)
        assert found.value == pytest.approx(full_positivity(term), abs=1e-7)
        if name == "ours":
            through = vocabulary.matching_through_shift(second, head)
            expected = full_positivity(back * embed @ query @ key.T @ embed.T)
            assert through.value == pytest.approx(expected, abs=1e-7)
        else:
            with pytest.raises(UserError, match="layer 1 does not shift its keys"):
                vocabulary.matching_through_shift(second, head)
        table = (beta * embed @ into @ out @ unembed.T).float()
        tokens = torch.arange(2, model.vocabulary)
        share = (table.argmax(-1) == torch.arange(model.vocabulary))[2:].double().mean()
        assert vocabulary.copied_share(second, head, tokens) == pytest.approx(float(share))
        assert vocabulary.raised(second, head, 7, 4) == table[7].topk(4).indices.tolist()


def test_pieces_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CircuitModel(zoo.build("llama"))
    weights = layer_weights(model, 1, offset=OFFSET)
    whole, tokens = Vocabulary(model), torch.arange(model.vocabulary)
    before = [whole.copied_share(weights, h, tokens) for h in range(4)], whole.copying(weights, 1).value
    monkeypatch.setattr("keyshift.circuits.eigen.VOCABULARY_CHUNK", 7)
    pieces = Vocabulary(model)
    assert [pieces.copied_share(weights, h, tokens) for h in range(4)] == before[0]
    assert pieces.copying(weights, 1).value == pytest.approx(before[1])


def test_examples_of_positivity() -> None:
    assert positivity(torch.tensor([[2.0, 0], [0, 1]])).value == 1
    assert positivity(torch.tensor([[0.0, 1], [1, 0]])).value == 0
    assert positivity(torch.tensor([[2.0, 0], [0, -1]])).value == pytest.approx(1 / 3)
    assert positivity(torch.tensor([[2.0, 0], [0, -1]]), sign=-2.0).value == pytest.approx(-1 / 3)


def test_a_zero_head() -> None:
    for zero in (positivity(torch.zeros(3, 3)), positivity(torch.eye(3), sign=0.0)):
        assert zero.zero
        assert (zero.value, zero.condition) == (0, 1)
    weights = layer_weights(opened(two_layers()), 1)
    model = Vocabulary(opened(two_layers()))
    assert model.copying(weights, 1).zero
    assert model.direct(weights, 1).zero
    assert not model.copying(weights, 0).zero
    assert composition("K", weights, 1, layer_weights(opened(two_layers()), 0), 0) == 0


def test_conditioning() -> None:
    """Eigenvectors (1, 0) and (1, t): the closer they are, the worse."""
    assert positivity(torch.diag(torch.tensor([1.0, 2, 3]))).condition == pytest.approx(1)
    for t in (1e-2, 1e-4):
        matrix = torch.tensor([[1, 1], [0, 1 + t]], dtype=torch.float64)
        vectors = torch.tensor(
            [[1, 1 / (1 + t * t) ** 0.5], [0, t / (1 + t * t) ** 0.5]], dtype=torch.float64
        )
        expected = float(torch.linalg.cond(vectors))
        assert positivity(matrix).condition == pytest.approx(expected, rel=1e-3)
        assert expected > 1 / t
    assert positivity(torch.tensor([[1.0, 1], [0, 1]])).condition > 1e10


@given(size=st.integers(1, 6), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_positivity_lies_between(size: int, seed: int) -> None:
    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = positivity(matrix)
    assert -1 <= found.value <= 1
    assert found.value == pytest.approx(full_positivity(matrix), abs=1e-9)
    assert positivity(matrix.T).value == pytest.approx(found.value, abs=1e-6)
    assert positivity(-3 * matrix).value == pytest.approx(-found.value, abs=1e-9)


# --- composition


def random_weights(seed: int, width: int = 10, heads: int = 2, layer: int = 1) -> LayerWeights:
    draw = torch.Generator().manual_seed(seed)
    query, key, value, output = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((heads, width, 3), (heads, width, 3), (heads, width, 4), (heads, 4, width))
    )
    return LayerWeights(layer, query, key, value, output)


@given(st.integers(0, 999), st.integers(2, 12))
@settings(max_examples=30, deadline=None)
def test_composition_is_that_of_whole_matrices(seed: int, width: int) -> None:
    later, earlier = random_weights(seed, width), random_weights(seed + 1, width, layer=0)
    ov = earlier.value_GDM[0] @ earlier.output_HMD[0]
    qk = later.query_HDN[1] @ later.key_GDN[1].T
    own = later.value_GDM[1] @ later.output_HMD[1]
    for kind, product, factor in (("K", qk @ ov.T, qk), ("Q", ov @ qk, qk), ("V", ov @ own, own)):
        expected = product.norm() / (ov.norm() * factor.norm())
        assert composition(kind, later, 1, earlier, 0) == pytest.approx(float(expected))  # type: ignore[arg-type]
    assert composition("V", later, 1, random_zero(width), 0) == 0


def random_zero(width: int) -> LayerWeights:
    zeros = torch.zeros(1, width, 3, dtype=torch.float64)
    return LayerWeights(0, zeros, zeros, zeros, zeros.mT)


def pair(queries: Tensor, keys: Tensor) -> LayerWeights:
    """A head whose QK circuit looks from the first columns to the second; it writes nothing."""
    nothing = torch.zeros_like(queries[None])
    return LayerWeights(1, queries[None], keys[None], nothing, nothing.mT)


def swapped(later: LayerWeights, earlier: LayerWeights) -> float:
    """The product in the wrong order."""
    ov = earlier.ov(0)[0] @ earlier.ov(0)[1]
    qk = later.qk(0)[0] @ later.qk(0)[1].T
    return float((ov.T @ qk).norm() / (ov.norm() * qk.norm()))


def test_a_pair_that_exposes_the_swapped_product() -> None:
    """An earlier head moves what stands in columns A to B. A head that compares B with B reads it through its
    keys, one that compares A with A does not; the swapped product says the opposite. The induction pair,
    which compares A with B, scores the same both ways and cannot tell."""
    one = torch.eye(16, dtype=torch.float64)
    a, b = one[:, :8], one[:, 8:]
    earlier = LayerWeights(0, a[None], a[None], a[None], b.T[None])
    reads, blind, classic = pair(b, b), pair(a, a), pair(a, b)
    assert composition("K", reads, 0, earlier, 0) == pytest.approx(8**-0.5)
    assert round(composition("K", reads, 0, earlier, 0), 3) == 0.354
    assert composition("K", blind, 0, earlier, 0) == 0
    assert swapped(reads, earlier) == 0
    assert round(swapped(blind, earlier), 3) == 0.354
    assert composition("K", classic, 0, earlier, 0) == pytest.approx(swapped(classic, earlier))
    assert round(swapped(classic, earlier), 3) == 0.354


def test_what_composition_refuses() -> None:
    later, earlier = random_weights(0), random_weights(1, layer=0)
    with pytest.raises(UserError, match="kind='k' is not known"):
        composition("k", later, 0, earlier, 0)  # type: ignore[arg-type]
    for first, second in ((earlier, later), (later, later)):
        with pytest.raises(UserError, match="is not earlier than"):
            composition("K", first, 0, second, 0)
    for head, other in ((2, 0), (0, 2), (-1, 0)):
        with pytest.raises(UserError, match="is out of range: layer"):
            composition("K", later, head, earlier, other)


@pytest.mark.parametrize("kind", ["K", "Q", "V"])
def test_random_baseline(kind: Any) -> None:
    """1 / √D: of a product of independent matrices, each column keeps its length, over √D."""
    later, earlier = random_weights(0, width=400, heads=1), random_weights(1, width=400, heads=1)
    found = random_composition(kind, later, earlier)
    assert found == pytest.approx(400**-0.5, rel=0.15)
    assert found == random_composition(kind, later, earlier)
    assert found != random_composition(kind, later, earlier, seed=1)
    scores = [
        composition(kind, random_weights(s, 400, 1), 0, random_weights(s + 1, 400, 1, layer=0), 0)
        for s in range(40)
    ]
    assert found == pytest.approx(sum(scores) / 40, rel=0.1)


def test_the_papers_random_level() -> None:
    """0.044 for rank 64 in 512 dimensions."""
    shapes = LayerWeights(0, *(torch.zeros(1, 512, 64),) * 3, torch.zeros(1, 64, 512))
    assert round(random_composition("K", shapes, shapes), 3) == 0.044


# --- norms


class Olmo(nn.Module):
    """A LayerNorm without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)


class Shifted(nn.RMSNorm):
    """A gain that is kept less 1, as in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


NORMS: dict[str, tuple[Callable[[], nn.Module], bool, Callable[[Any], Tensor]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(6), True, lambda norm: norm.weight),
    "RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-6), False, lambda norm: norm.weight),
    "Gemma": (lambda: Shifted(6), False, lambda norm: 1 + norm.weight),
    "OLMo": (Olmo, True, lambda norm: torch.ones(6)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_read_by_asking_them(name: str) -> None:
    build, centres, gain = NORMS[name]
    torch.manual_seed(1)
    module = build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    norm = read_norm(module, 6)
    assert norm is not None
    assert norm.centres == centres
    torch.testing.assert_close(norm.gain_D, gain(module).detach().double(), rtol=1e-5, atol=1e-6)
    bias = getattr(module, "bias", None)
    close(norm.bias_D, torch.zeros(6) if bias is None else bias)
    # parts of the input, at the scale of the whole: the output less the bias
    x, matrix = torch.randn(3, 6).double(), torch.randn(6, 4).double()
    part, after = torch.randn(3, 6).double(), module.double()(x).detach()
    first, second = norm.linear(part, x, after), norm.linear(x - part, x, after)
    torch.testing.assert_close(first + second, after - norm.bias_D, rtol=1e-5, atol=1e-5)
    # folded into a matrix that reads, and into one that writes
    middle = torch.eye(6).double() - 1 / 6 if centres else torch.eye(6).double()
    exact = middle @ torch.diag(gain(module).detach().double())
    torch.testing.assert_close(norm.fold(matrix), exact @ matrix, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.fold_output(matrix.T), matrix.T @ exact, rtol=1e-5, atol=1e-5)
    scale = (x @ middle).square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(
        (x @ norm.fold(matrix)) / scale, (after - norm.bias_D) @ matrix, rtol=1e-4, atol=1e-4
    )


def test_what_is_no_norm() -> None:
    others = [nn.Linear(6, 6), nn.SiLU(), nn.Dropout(), nn.Embedding(6, 6), nn.Identity(), nn.RMSNorm(5)]
    assert [read_norm(module.eval(), 6) for module in others] == [None] * 6

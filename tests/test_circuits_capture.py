"""What is captured of attention: the model's own numbers, nothing changed, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
import transformers
import zoo
from tiny import CASES, FEW, Case
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedTokenizerFast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

from keyshift import KeyshiftForCausalLM, UserError
from keyshift.circuits import CircuitModel, capture, patterns, read_streams
from keyshift.circuits.capture import AttentionCall

T = 12
SOME = list(dict.fromkeys([*FEW, *CASES[::4]]))
"""Every mechanism, position and shift, with most pairs."""


def ids_of(vocabulary: int, *shape: int) -> Tensor:
    """Random tokens that are no special ones."""
    return torch.randint(3, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def left_padded(ids_ST: Tensor, pads: list[int]) -> tuple[Tensor, Tensor]:
    """The sequences shifted to the right by so many padding tokens each, and the mask."""
    total = ids_ST.shape[1] + max(pads)
    ids, mask = torch.zeros(len(ids_ST), total, dtype=torch.long), torch.zeros(len(ids_ST), total)
    for row, pad in enumerate(pads):
        ids[row, pad : pad + ids_ST.shape[1]] = ids_ST[row]
        mask[row, pad:] = 1
        ids[row, pad + ids_ST.shape[1] :] = 5  # real tokens too: whatever follows changes nothing before it
    return ids, mask.long()


def eager(case: Case) -> KeyshiftForCausalLM:
    model = KeyshiftForCausalLM(case.config(attn_implementation="eager")).eval()
    model.load_state_dict(tiny.build(case).state_dict())
    return model


def eager_weights(model: Any, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
    inputs: dict[str, Any] = {}
    if mask is not None:
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        return model(ids, output_attentions=True, use_cache=False, **inputs).attentions


# --- the model's own patterns


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_watching_changes_nothing(name: str) -> None:
    model = zoo.build(name)
    ids = ids_of(zoo.VOCAB, 2, T)
    seen: list[Tensor] = []
    watched = CircuitModel(model).logits(ids, observer=lambda call: seen.append(call.pattern()))
    with torch.no_grad():
        assert torch.equal(watched, model(ids, use_cache=False).logits)
    assert [pattern.shape for pattern in seen] == [(2, 4, T, T)] * 2


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_patterns_are_those_of_eager_attention(name: str) -> None:
    model, other = CircuitModel(zoo.build(name)), zoo.fresh(name, attn_implementation="eager")
    ids, mask = left_padded(ids_of(zoo.VOCAB, 2, T), [3, 0])
    real = mask.bool()[:, None, :, None]
    for found, expected in zip(patterns(model, ids), eager_weights(other, ids), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
        sums = found.sum(-1)
        assert torch.allclose(sums, torch.ones(())) != (name == "gpt_oss")  # its sinks take a part
    for found, expected in zip(patterns(model, ids, mask), eager_weights(other, ids, mask), strict=True):
        torch.testing.assert_close(found * real, expected * real, rtol=1e-5, atol=2e-6)
        assert not bool((found * real)[0, ..., :3].any())


def test_sliding_windows_are_seen() -> None:
    pattern = patterns(CircuitModel(zoo.build("mistral")), ids_of(zoo.VOCAB, 1, T))[0]
    back = torch.arange(T)[:, None] - torch.arange(T)
    outside = (back >= 4) | (back < 0)
    assert not bool(pattern[..., outside].any())
    assert float(pattern[..., ~outside].min()) > 0


@pytest.mark.parametrize("case", SOME, ids=str)
def test_our_patterns(case: Case) -> None:
    model = CircuitModel(tiny.build(case))
    ids, mask = left_padded(ids_of(tiny.VOCAB, 2, 6), [2, 0])
    real = mask.bool()[:, None, :, None]
    expected = eager_weights(eager(case), ids, mask)
    for found, weights in zip(patterns(model, ids, mask), expected, strict=True):
        torch.testing.assert_close(found * real, weights * real, rtol=1e-4, atol=1e-5)
        assert torch.allclose((found.sum(-1) * mask[:, None]), mask[:, None].float().expand(-1, 4, -1))
    seen: list[Tensor] = []
    watched = model.logits(ids, mask, lambda call: seen.append(call.pattern()))
    assert len(seen) == 2
    assert torch.equal(watched, model.logits(ids, mask))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_oss", "ours"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        if name == "ours":
            return KeyshiftForCausalLM(FEW[0].config()).eval()
        return zoo.fresh(name)

    torch.manual_seed(0)
    model = build().to(dtype)
    torch.manual_seed(0)
    exact = build().to(dtype).float()
    ids = ids_of(tiny.VOCAB, 2, T)
    half, full = CircuitModel(model), CircuitModel(exact)
    assert half.dtype == dtype
    for found, expected in zip(patterns(half, ids), patterns(full, ids), strict=True):
        assert found.dtype == torch.float32
        assert torch.allclose(found.sum(-1), torch.ones(()), atol=1e-5) != (name == "gpt_oss")
        assert float((found - expected).abs().max()) < (0.05 if dtype == torch.bfloat16 else 0.01)
        assert not torch.equal(found, expected)


def test_blocks_of_a_long_sequence() -> None:
    length = 4096
    model = zoo.fresh("gpt2", n_positions=length, n_embd=4, n_head=1, n_layer=1, vocab_size=64)
    opened = CircuitModel(model)
    kept: list[AttentionCall] = []
    opened.watch(ids_of(64, 1, length), observer=kept.append)
    whole, done = kept[0].pattern(), 0
    for rows, weights in kept[0].blocks():
        assert rows.start == done
        assert weights.numel() * 4 <= capture.BLOCK_BYTES
        torch.testing.assert_close(weights, whole[:, :, rows], rtol=1e-5, atol=1e-7)
        done = rows.stop
    assert done == length
    assert torch.allclose(whole.sum(-1), torch.ones(()), atol=1e-5)
    assert not bool(whole.triu(1).any())


def test_what_an_observer_returns_replaces_the_output() -> None:
    model = CircuitModel(zoo.build("llama"))
    ids = ids_of(zoo.VOCAB, 1, T)
    plain = model.logits(ids)
    assert torch.equal(model.logits(ids, observer=lambda call: call.output_BTHV.clone()), plain)
    changed = model.logits(ids, observer=lambda call: torch.zeros_like(call.output_BTHV))
    with torch.no_grad():
        silent = zoo.fresh("llama")
        for layer in silent.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        assert torch.equal(changed, silent(ids, use_cache=False).logits)
    assert not torch.equal(changed, plain)


def test_attending_again_gives_the_same_call() -> None:
    for model in (CircuitModel(zoo.build("qwen3")), CircuitModel(tiny.build(FEW[0]))):
        streams = read_streams(model, ids_of(tiny.VOCAB, 2, T))
        for layer, call in enumerate(streams.calls):
            module, given = model.layers[layer].attention, streams.arguments[layer]
            again = model.attend_again(module, given, streams.normed[layer])
            assert isinstance(again, AttentionCall)
            assert torch.equal(again.queries_BHTD, call.queries_BHTD)
            assert torch.equal(again.keys_BGTD, call.keys_BGTD)
            output = model.attend_again(module, given, streams.normed[layer], lambda call: call.output_BTHV)
            assert isinstance(output, Tensor)
            assert torch.equal(output, streams.attended[layer])


# --- nothing is left behind


def registered() -> dict[str, Any]:
    return dict(ALL_ATTENTION_FUNCTIONS._local_mapping)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_registry_is_restored(name: str) -> None:
    before = registered()
    model = CircuitModel(zoo.build(name))
    inside: list[dict[str, Any]] = []
    model.logits(ids_of(zoo.VOCAB, 1, 4), observer=lambda call: inside.append(registered()))
    assert inside[0] != before
    assert registered() == before

    def fails(call: AttentionCall) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.logits(ids_of(zoo.VOCAB, 1, 4), observer=fails)
    assert registered() == before
    with pytest.raises(UserError, match="positions"):
        model.logits(ids_of(zoo.VOCAB, 1, 200), observer=lambda call: None)
    assert registered() == before


@pytest.fixture
def registry() -> Iterator[None]:
    """Puts back what a test registers."""
    before = registered()
    yield
    for name in registered():
        del ALL_ATTENTION_FUNCTIONS[name]
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function


@pytest.mark.usefixtures("registry")
def test_a_users_own_function_stays_in_place() -> None:
    fused, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return fused(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = own
    seen: list[AttentionCall] = []
    model = CircuitModel(zoo.build("llama"))
    calls.clear()
    model.watch(ids_of(zoo.VOCAB, 1, 4), observer=seen.append)
    assert len(calls) == len(seen) == 2
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own


def test_two_models_do_not_see_each_others_calls() -> None:
    first, second = CircuitModel(zoo.build("llama")), CircuitModel(zoo.build("gpt2"))
    ids = ids_of(zoo.VOCAB, 1, 4)
    mine: list[AttentionCall] = []
    theirs: list[AttentionCall] = []

    def observer(call: AttentionCall) -> None:
        mine.append(call)
        second.module(ids)  # not watched
        second.watch(ids, observer=theirs.append)

    plain = first.logits(ids)
    assert torch.equal(first.logits(ids, observer=observer), plain)
    assert [id(call.module) for call in mine] == [id(layer.attention) for layer in first.layers]
    assert [id(call.module) for call in theirs] == 2 * [id(layer.attention) for layer in second.layers]


# --- refusals


def one_line(error: pytest.ExceptionInfo[UserError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def test_attention_that_calls_no_interface_is_refused() -> None:
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=31, hidden_size=16, n_layer=1, n_head=2)
    )
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1)
    )
    for model in (bloom, mamba):
        with pytest.raises(UserError) as error:
            CircuitModel(model, name="x")
        one_line(error, "x (", "no attention weights", type(model).__name__)


@pytest.mark.usefixtures("registry")
def test_attention_under_another_name_is_refused() -> None:
    AttentionInterface.register("elsewhere", ALL_ATTENTION_FUNCTIONS["sdpa"])
    model = zoo.fresh("llama", attn_implementation="elsewhere")
    with pytest.raises(UserError) as error:
        CircuitModel(model)
    one_line(error, "'sdpa' or 'eager'")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    model = zoo.fresh("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = value
    with pytest.raises(UserError) as error:
        CircuitModel(model, name="x")
    one_line(error, "model.layers.1.self_attn.v_proj.weight", "NaN")


def test_logits_that_are_not_finite_are_refused() -> None:
    model = zoo.fresh("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(1e38)
        model.model.norm.weight.fill_(1e20)
    with pytest.raises(UserError) as error:
        CircuitModel(model, name="x")
    one_line(error, "logits of x")


def words(count: int, **special: str) -> PreTrainedTokenizerFast:
    vocabulary = {f"w{index}": index for index in range(count)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0")), unk_token="w0", **special
    )


def test_a_tokenizer_that_is_too_large_is_refused() -> None:
    assert CircuitModel(zoo.build("llama"), words(zoo.VOCAB)).vocabulary == zoo.VOCAB
    with pytest.raises(UserError) as error:
        CircuitModel(zoo.build("llama"), words(zoo.VOCAB + 1))
    one_line(error, f"{zoo.VOCAB + 1} tokens", str(zoo.VOCAB))


@pytest.mark.usefixtures("registry")
def test_attention_that_is_no_softmax_is_refused() -> None:
    def sigmoid(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        return ((query @ key.mT).sigmoid().tril() @ value).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = sigmoid
    with pytest.raises(UserError) as error:
        CircuitModel(zoo.build("llama"))
    one_line(error, "does more than softmax(scores) × values")


@pytest.mark.usefixtures("registry")
def test_a_model_that_is_never_twice_the_same_is_refused() -> None:
    fused = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def noisy(*args: Any, **kwargs: Any) -> Any:
        output, weights = fused(*args, **kwargs)
        return output + 1e-6 * torch.randn_like(output), weights

    ALL_ATTENTION_FUNCTIONS["sdpa"] = noisy
    with pytest.raises(UserError) as error:
        CircuitModel(zoo.build("llama"))
    one_line(error, "changes its logits")


def test_projected_embeddings_are_refused() -> None:
    with pytest.raises(UserError) as error:
        CircuitModel(zoo.fresh("opt", word_embed_proj_dim=8))
    one_line(error, "embeds tokens in 8 numbers")


class InheritedAttention(LlamaAttention):
    """In a file without an eager attention of its own."""


def test_eager_attention_of_a_subclass_in_another_file() -> None:
    model, plain = (zoo.fresh("llama", attn_implementation="eager") for _ in range(2))
    for layer in model.model.layers:
        layer.self_attn.__class__ = InheritedAttention
    ids = ids_of(zoo.VOCAB, 1, T)
    for found, expected in zip(patterns(CircuitModel(model), ids), eager_weights(plain, ids), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["1", "1.x", ".1", "1.²", "-1.0", "2.0", "0.4", "0.0.0", ""])
def test_names_of_heads(name: str) -> None:
    model = CircuitModel(zoo.build("llama"), name="x")
    assert [model.head(each) for each in model.head_names()] == [(lay, h) for lay in (0, 1) for h in range(4)]
    with pytest.raises(UserError, match=r"must look like|out of range"):
        model.head(name)


def test_too_many_tokens_and_unknown_ones() -> None:
    model = CircuitModel(zoo.build("gpt2"), name="x")
    with pytest.raises(UserError, match="129 tokens are more than x has positions for"):
        model.logits(ids_of(zoo.VOCAB, 1, 129))
    for token in (-1, zoo.VOCAB):
        with pytest.raises(UserError, match=f"token {token} is outside the vocabulary"):
            model.watch(torch.tensor([[1, token]]))

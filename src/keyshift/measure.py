"""What a model's cache really takes, how long a token takes, and what its shifts have learned."""

from __future__ import annotations

import statistics
import time
from typing import Literal

import torch

from keyshift.attention.shift import Shift
from keyshift.cache import KeyshiftCache
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.results import ShiftWeights

ROUNDS = 32

SHIFTS: dict[str, Literal["query", "key", "value"]] = {
    "query_shift": "query",
    "key_shift": "key",
    "value_shift": "value",
}


@torch.inference_mode()
def measured_bytes_per_token(model: KeyshiftForCausalLM, tokens: int = 64) -> float:
    """Allocated bytes per token of a real cache, filled by the model itself: prefill, then one more token.

    The query state of ``shift="qkv"``, which does not grow, is left out.
    """
    tokens = min(tokens, model.config.max_position_embeddings)
    cache = KeyshiftCache(model.config, max_length=tokens)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    model(ids[:, :-1], past_key_values=cache, use_cache=True)
    model(ids[:, -1:], past_key_values=cache, use_cache=True)
    states = [layer.query_state for layer in cache.layers if layer.query_state is not None]
    state_bytes = sum(state.untyped_storage().nbytes() for state in states)
    return (cache.allocated_bytes - state_bytes) / cache.capacity


@torch.inference_mode()
def decode_seconds(models: list[KeyshiftForCausalLM], prompt_length: int) -> list[float]:
    """Seconds per decoded token after a prompt, one sequence, greedy; the median for each model.

    The models take turns token by token, so that whatever else the machine does strikes all of them alike.
    """
    states = []
    for model in models:
        cache = KeyshiftCache(model.config, max_length=prompt_length + ROUNDS)
        ids = torch.zeros(1, prompt_length, dtype=torch.long, device=model.device)
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        states.append((model, cache, logits))
    times: list[list[float]] = [[] for _ in models]
    for _ in range(min(ROUNDS, *(m.config.max_position_embeddings - prompt_length for m in models))):
        for index, (model, cache, logits) in enumerate(states):
            began = time.perf_counter()
            logits = model(logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True).logits
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            times[index].append(time.perf_counter() - began)
            states[index] = (model, cache, logits)
    return [statistics.median(each) for each in times]


def learned_shifts(model: KeyshiftForCausalLM) -> list[ShiftWeights]:
    """Every head's mixing weights: α of keys, β of values, γ of queries.

    Of a sharded model all processes must ask.
    """
    found = []
    for layer, block in enumerate(model.model.layers):
        for attribute, role in SHIFTS.items():
            shift: Shift | None = getattr(block.self_attn, attribute)
            if shift is not None:
                weights = shift.weights().detach()
                whole = weights.full_tensor() if hasattr(weights, "full_tensor") else weights
                found.append(ShiftWeights(layer=layer, of=role, weights=whole.float().tolist()))
    return found

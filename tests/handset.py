"""Models whose weights are set by hand, so that what their heads do is known: one that completes repeats in
one layer by its shift, one that needs two layers.

D hidden size, V vocabulary, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.circuits import CircuitModel

ONES: dict[str, Any] = {
    "mlp": "none",
    "attention": "mha",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-9,
}


def one_layer(
    alpha: tuple[float, float] = (0.0, 1.0), beta: tuple[float, float] = (1.0, 0.0), vocabulary: int = 32
) -> KeyshiftForCausalLM:
    """One head, one-hot embeddings, W_Q = 3 and W_K = W_V = W_O = 1: it looks where keys are its token's."""
    config = KeyshiftConfig(
        **ONES,
        vocab_size=vocabulary,
        hidden_size=vocabulary,
        head_dim=vocabulary,
        num_hidden_layers=1,
        num_attention_heads=1,
        position="none",
        shift="kv",
    )
    model = KeyshiftForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    one = torch.eye(vocabulary)
    set_weights(
        model,
        {
            "model.embed_tokens.weight": one,
            "lm_head.weight": one,
            "model.layers.0.self_attn.q_proj.weight": 3 * one,
            "model.layers.0.self_attn.source.k_proj.weight": one,
            "model.layers.0.self_attn.source.v_proj.weight": one,
            "model.layers.0.self_attn.o_proj.weight": one,
        },
    )
    with torch.no_grad():
        attention.key_shift.weight.copy_(torch.tensor([alpha]))
        attention.value_shift.weight.copy_(torch.tensor([beta]))
    return model


def two_layers(vocabulary: int = 16, positions: int = 17) -> KeyshiftForCausalLM:
    """Heads 0.0 (previous token) and 1.0 (induction); 0.1 and 1.1 are zero.

    The stream: which token (V), which position (T), which token stood before (V).
    """
    width, head = 2 * vocabulary + positions, max(vocabulary, positions)
    config = KeyshiftConfig(
        **ONES,
        vocab_size=vocabulary,
        hidden_size=width,
        head_dim=head,
        num_hidden_layers=2,
        num_attention_heads=2,
        position="learned",
        max_position_embeddings=positions,
    )
    model = KeyshiftForCausalLM(config).eval()
    token, place, note = (
        slice(vocabulary),
        slice(vocabulary, vocabulary + positions),
        slice(-vocabulary, None),
    )

    def reads(columns: slice, matrix: Tensor) -> Tensor:
        weight = torch.zeros(2 * head, width)
        weight[: matrix.shape[0], columns] = matrix
        return weight

    def writes(columns: slice, matrix: Tensor) -> Tensor:
        return reads(columns, matrix).T

    tokens, places = torch.eye(vocabulary), torch.eye(positions)
    embed, where = torch.zeros(vocabulary, width), torch.zeros(positions, width)
    embed[:, token], where[:, place] = tokens, places
    unembed = torch.zeros(vocabulary, width)
    unembed[:, token] = tokens
    first, second = "model.layers.0.self_attn.", "model.layers.1.self_attn."
    set_weights(
        model,
        {
            "model.embed_tokens.weight": embed,
            "model.embed_positions.weight": where,
            "lm_head.weight": unembed,
            first + "q_proj.weight": reads(place, 4 * places),
            first + "source.k_proj.weight": reads(place, torch.diag(torch.ones(positions - 1), -1)),
            first + "source.v_proj.weight": reads(token, tokens),
            first + "o_proj.weight": writes(note, tokens),
            second + "q_proj.weight": reads(token, 8 * tokens),
            second + "source.k_proj.weight": reads(note, tokens),
            second + "source.v_proj.weight": reads(token, tokens),
            second + "o_proj.weight": writes(token, tokens),
        },
    )
    return model


def set_weights(model: KeyshiftForCausalLM, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)


def opened(model: Any) -> CircuitModel:
    return CircuitModel(model, name="handset")

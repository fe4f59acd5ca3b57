"""RoPE of longer contexts turns as transformers' does, and what cannot be computed is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from keyshift import KeyshiftConfig, UserError
from keyshift.attention.rope_scaling import scaled

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

FACTORS = st.floats(1, 64)
CONTEXTS = st.integers(64, 131072)
LINEAR = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS})
LLAMA3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": FACTORS,
        "low_freq_factor": st.floats(0.5, 2),
        "high_freq_factor": st.floats(3, 8),
        "original_max_position_embeddings": CONTEXTS,
    }
)
YARN = st.fixed_dictionaries(
    {"rope_type": st.just("yarn"), "factor": FACTORS, "original_max_position_embeddings": CONTEXTS},
    optional={
        "attention_factor": st.floats(0.5, 2),
        "mscale": st.floats(0.1, 2),
        "mscale_all_dim": st.floats(0.1, 2),
        "beta_fast": st.floats(16, 64),
        "beta_slow": st.floats(0.5, 4),
        "truncate": st.booleans(),
    },
)


@settings(deadline=None)
@given(
    st.one_of(LINEAR, LLAMA3, YARN), st.sampled_from([4, 16, 64, 128]), st.sampled_from([1e3, 1e4, 5e5, 1e6])
)
def test_pairs_turn_as_those_of_transformers(scaling: dict[str, Any], width: int, theta: float) -> None:
    theirs = LlamaConfig(head_dim=width, rope_parameters={**scaling, "rope_theta": theta})
    expected, size = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    speeds, ours = scaled(plain, theta, scaling)
    torch.testing.assert_close(speeds.float(), expected, rtol=1e-4, atol=0)
    assert ours == pytest.approx(size)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' turns a token by the length"),
        ({"rope_type": "longrope"}, "rope_type='longrope' turns"),
        ({"rope_type": "yarm"}, "did you mean 'yarn'"),
        ({"rope_type": "linear"}, "rope_type='linear' needs factor above 0, not None"),
        ({"rope_type": "linear", "factor": "2"}, "needs factor above 0, not '2'"),
        ({"rope_type": "linear", "factor": 2.0, "factors": 3}, "factors=3 is not a number of"),
        ({**LLAMA31, "low_freq_factor": 4.0}, "low_freq_factor=4.0 below high_freq_factor=4.0"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "truncate": 1},
            "truncate=1 of rope_type='yarn' must be true or false",
        ),
        ("yarn", "scaled_rope='yarn' must be a table"),
    ],
)
def test_what_cannot_be_computed_is_refused(scaling: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        KeyshiftConfig(scaled_rope=scaling)
    assert message in str(caught.value)


def test_only_rope_can_be_scaled_and_transformers_way_of_writing_it_is_understood() -> None:
    with pytest.raises(UserError, match="which position='alibi' has not"):
        KeyshiftConfig(scaled_rope=LLAMA31, position="alibi")
    with pytest.raises(UserError, match="partial_rotary_factor below 1"):
        KeyshiftConfig(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    config = KeyshiftConfig(rope_parameters={**LLAMA31, "rope_theta": 5e5})
    assert (config.scaled_rope, config.rope_theta) == (LLAMA31, 5e5)
    assert KeyshiftConfig.from_dict(config.to_dict()).scaled_rope == LLAMA31
    assert KeyshiftConfig(rope_parameters={"rope_type": "default", "rope_theta": 3.0}).scaled_rope is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_norm": True, "attention": "gva"}, "key_norm=True with attention='gva' would stand between"),
        ({"stream_norm": True, "attention": "gqa"}, "stream_norm=True with attention='gqa', which projects"),
    ],
)
def test_what_stands_in_the_way_of_a_reconstructed_key_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        KeyshiftConfig(**fields)

"""What cannot be served, said before anything is loaded."""

from __future__ import annotations

from vllm.config import VllmConfig

from keyshift.configuration import RECONSTRUCTED, KeyshiftConfig
from keyshift.errors import UserError


def check_servable(vllm_config: VllmConfig) -> None:
    """The model and what it is served with go together.

    Raises:
        UserError: naming the setting and what would do.
    """
    _check_model(vllm_config.model_config.hf_config)
    if vllm_config.quant_config is not None:
        raise UserError(
            f"quantization={vllm_config.model_config.quantization!r} is not supported for keyshift models: "
            "their attention multiplies with weights of the model's dtype; serve an unquantised checkpoint"
        )
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
        raise UserError(
            f"kv_cache_dtype={cache_dtype!r} is not supported for keyshift models, whose pages are read "
            "in the model's dtype; use 'auto'"
        )
    parallel = vllm_config.parallel_config
    for size in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, size) > 1:
            raise UserError(
                f"{size}={getattr(parallel, size)} is not supported for keyshift models: a sequence's pages "
                "lie with one process; use tensor_parallel_size"
            )
    if vllm_config.kv_transfer_config is not None:
        raise UserError(
            f"kv_connector={vllm_config.kv_transfer_config.kv_connector!r} is not supported for keyshift "
            "models: their layers do not hand pages over; leave --kv-transfer-config out"
        )


def _check_model(config: KeyshiftConfig) -> None:
    if config.shift == "qkv":
        raise UserError(
            "shift='qkv' keeps raw queries of each sequence beside its pages, which vLLM has no place for; "
            "serve a model with shift='kv', or use keyshift generate"
        )
    if config.attention in RECONSTRUCTED and config.position == "rope":
        raise UserError(
            f"attention={config.attention!r} with position='rope' would rebuild every cached key at every "
            "token; serve a model with position='decoupled_rope', or use keyshift generate"
        )
    if config.mlp == "swiglu" and config.hidden_act != "silu":
        raise UserError(
            f"hidden_act={config.hidden_act!r} is not supported by vLLM's SwiGLU; it must be 'silu'"
        )

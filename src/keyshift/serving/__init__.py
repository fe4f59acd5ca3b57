"""keyshift checkpoints on vLLM (``pip install keyshift[vllm]``); `keyshift.vllm_plugin` makes vLLM find it.

`model` is the decoder on vLLM's layers, `shares` what each process of tensor parallelism holds of it, `pages`
the attention backend: raw streams in vLLM's pages, read by `keyshift.ops.stream_attention` where they lie.

Raises:
    RunError: imported without vLLM, or with a version that is not supported.
"""

from keyshift.vllm_plugin import check

check()

"""What every mechanism would cache at a model's sizes: predicted, measured, and how many sequences fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from keyshift.cache import CACHE_DTYPES, KeyshiftCache, cache_bytes, cache_bytes_per_token
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError, first_line, nearest
from keyshift.memory import free_memory
from keyshift.modeling import KeyshiftModel

TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "int8": torch.bfloat16,
    "int4": torch.bfloat16,
}
"""What may be asked for, and the model's dtype with it: rounded caches are those of bfloat16 models."""
PAPER_ROTARY_WIDTHS = (16, 24)
MEMORY_SHARE = 0.25
"""A whole cache is allocated only if it takes less than this share of the free memory; else one layer of
it."""

Row = dict[str, Any]


def load_config(name_or_path: str) -> PreTrainedConfig:
    """The configuration of a checkpoint: a config.json, a folder that holds one, or a hub name.

    Raises:
        UserError: nothing there, not JSON, or a model type that transformers does not know.
    """
    path = Path(name_or_path)
    if not path.exists() and (
        path.is_absolute() or path.suffix == ".json" or name_or_path.startswith((".", "~"))
    ):
        raise UserError(f"model={name_or_path!r}: no such file or folder; pass a config.json or a checkpoint")
    try:
        if path.is_file():
            content = json.loads(path.read_text())
            return AutoConfig.for_model(content.pop("model_type"), **content)
        return AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
    except KeyError as error:
        raise UserError(f"{name_or_path} has no {error}: not a transformers config.json") from error
    except UserError:
        raise
    except Exception as error:  # whatever a foreign configuration class makes of foreign content
        raise UserError(f"no model configuration at {name_or_path!r}: {first_line(error)}") from error


def parse_tokens(text: str) -> int:
    """A number of tokens; 32k is 32,768, as contexts are counted.

    Raises:
        UserError: anything else, or none.
    """
    found = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise UserError(f"tokens={text!r} must be a number of at least 1, such as 4096 or 32k")
    return int(found[1]) * TOKENS[found[2]]


def parse_memory(text: str) -> int:
    """A number of bytes: 80GB is 80 · 10⁹, 80GiB is 80 · 2³⁰.

    Raises:
        UserError: anything else, none, or no unit.
    """
    try:
        count = 0 if text.strip().isdigit() else int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        count = 0
    if count < 1:
        raise UserError(f"memory={text!r} must be a size, such as 80GB or 80GiB")
    return count


def cache_rows(
    config: PreTrainedConfig, *, tokens: int, batch: int, dtype: str, memory: int | None = None
) -> list[Row]:
    """One row per mechanism: bytes per token and in total, predicted and measured, and the ratio to GQA.

    Args:
        config: ours, or any with Llama's names for its sizes.
        tokens: per sequence; batch: sequences; dtype: one of `DTYPES`.
        memory: bytes for caches; the rows then say how many batches of that size fit (``sequences``).

    Raises:
        UserError: an unknown dtype, or sizes that the configuration lacks.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is not known; {nearest(dtype, DTYPES)}")
    kind = DTYPES[dtype]
    rounded = dtype if dtype in CACHE_DTYPES else None
    mechanisms = _mechanisms(config)
    reference = cache_bytes_per_token(mechanisms["GQA"], kind, rounded)
    rows = []
    for name, each in mechanisms.items():
        per_token = cache_bytes_per_token(each, kind, rounded)
        total = cache_bytes(each, batch=batch, tokens=tokens, dtype=kind, cache_dtype=rounded)
        measured, layers = _measured(each, tokens, batch, kind, rounded)
        row = {
            "mechanism": name,
            "bytes_per_token": per_token,
            "bytes_predicted": total,
            "bytes_measured": measured,
            "layers_measured": layers,
            "layers": each.num_hidden_layers,
            "ratio_to_gqa": per_token / reference,
        }
        rows.append(row if memory is None else {**row, "sequences": memory // total * batch})
    return rows


def _mechanisms(config: PreTrainedConfig) -> dict[str, KeyshiftConfig]:
    """The mechanisms that are compared, all at the sizes of ``config``."""
    sizes = _sizes(config.get_text_config())
    heads = sizes["num_attention_heads"]
    groups = sizes.pop("num_key_value_heads")
    grouped = {**sizes, "num_key_value_heads": groups}
    own = getattr(config.get_text_config(), "qk_rope_head_dim", None)
    latent = {**sizes, "qk_rope_head_dim": own} if own else sizes
    rows = {
        "MHA": KeyshiftConfig(attention="mha", **sizes),
        "GQA": KeyshiftConfig(attention="gqa", **grouped),
        "GQA + KV shift": KeyshiftConfig(attention="gqa", shift="kv", **grouped),
        "MQA": KeyshiftConfig(attention="mqa", **sizes),
        "MLA": KeyshiftConfig(attention="mla", position="decoupled_rope", **latent),
        "shared KV": KeyshiftConfig(attention="shared_kv", position="none", **grouped),
        "GVA, no rotary key": KeyshiftConfig(attention="gva", position="none", **grouped),
    }
    own = own or PAPER_ROTARY_WIDTHS[0]
    for width in sorted({*PAPER_ROTARY_WIDTHS, own}):
        for shift in ("none", "kv") if width == own else ("none",):
            name = f"GVA, d_r = {width}" + (" + shift" if shift == "kv" else "")
            rows[name] = KeyshiftConfig(
                attention="gva",
                position="decoupled_rope",
                shift=shift,
                **{**grouped, "qk_rope_head_dim": width},
            )
    if groups == heads:
        rows["GQA"] = rows.pop("MHA")  # the same, and what the others are compared with
    return {"this model": config, **rows} if isinstance(config, KeyshiftConfig) else rows


def _sizes(config: PreTrainedConfig) -> dict[str, Any]:
    """The sizes that every mechanism shares, under Llama's names."""
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in needed if not isinstance(v := getattr(config, name, None), int) or v < 1]
    if missing:
        raise UserError(
            f"the configuration (model_type={config.model_type!r}) has no {', '.join(missing)}; "
            "its sizes must have Llama's names"
        )
    sizes = {name: getattr(config, name) for name in needed}
    heads = sizes["num_attention_heads"]
    # DeepSeek's configurations call the width of a value v_head_dim, and of the rotary slice head_dim.
    names = ("v_head_dim", "head_dim")
    head_dim = next(
        (w for name in names if (w := getattr(config, name, None))), sizes["hidden_size"] // heads
    )
    groups = getattr(config, "num_key_value_heads", None) or heads
    optional = {"kv_lora_rank": getattr(config, "kv_lora_rank", None)}
    given = {name: value for name, value in optional.items() if value}
    return {**sizes, **given, "head_dim": head_dim, "num_key_value_heads": groups}


@torch.inference_mode()
def _measured(
    config: KeyshiftConfig, tokens: int, batch: int, dtype: torch.dtype, rounded: str | None
) -> tuple[int | None, int]:
    """Allocated bytes of a real cache with that room, and how many of its layers were allocated to see.

    A model of one layer with random weights writes two tokens; the other layers get the same streams. None
    if not even one layer fits in memory.
    """
    total = cache_bytes(config, batch=batch, tokens=tokens, dtype=dtype, cache_dtype=rounded)
    free = free_memory()
    layers = config.num_hidden_layers if total < MEMORY_SHARE * free else 1
    if total // config.num_hidden_layers > free:
        return None, 0
    sizes = {**config.to_diff_dict(), "num_hidden_layers": 1, "vocab_size": 1, "mlp": "none"}
    sizes.pop("model_type", None)
    model = KeyshiftModel(KeyshiftConfig(**sizes)).to(dtype).eval()
    inputs = torch.zeros(1, min(2, tokens), config.hidden_size, dtype=dtype)
    one, cache = KeyshiftCache(model.config), KeyshiftCache(config, tokens, rounded)
    model(inputs_embeds=inputs, past_key_values=one, use_cache=True)
    (written,) = one.layers
    one.batch_repeat_interleave(batch)
    assert written.keys is not None
    assert written.values is not None
    for layer in cache.layers[:layers]:
        layer.update(written.keys, written.values)
        layer.query_state = written.query_state
    return cache.allocated_bytes * config.num_hidden_layers // layers, layers


def print_cache(rows: list[Row], console: Console) -> None:
    """The table, within 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mechanism")
    counted = "sequences" in rows[0]
    for header in ("bytes/token", "predicted", "measured", "ratio to GQA", *(["fit"] if counted else [])):
        table.add_column(header, justify="right")
    for row in rows:
        measured, whole = row["bytes_measured"], row["layers_measured"] == row["layers"]
        table.add_row(
            row["mechanism"],
            f"{row['bytes_per_token']:,}",
            _size(row["bytes_predicted"]),
            "does not fit" if measured is None else _size(measured) + ("" if whole else "*"),
            f"{row['ratio_to_gqa']:.3f}",
            *([f"{row['sequences']:,}"] if counted else []),
        )
    console.print(table)
    if any(0 < row["layers_measured"] < row["layers"] for row in rows):
        console.print("* one layer allocated and multiplied: all do not fit in free memory")


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"

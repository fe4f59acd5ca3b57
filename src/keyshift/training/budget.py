"""What a training run takes, before it begins: parameters, FLOPs, memory, cache, time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from keyshift.configuration import KeyshiftConfig
from keyshift.recipe import Engine, Training

if TYPE_CHECKING:
    from rich.console import Console

    from keyshift.training.step_time import StepTime

FLOAT32 = 4
"""Bytes; weights, gradients and AdamW's two moments are kept so, whatever products are computed in."""


class Counts(NamedTuple):
    """Parameters of a model, tied ones once.

    Attributes:
        total: all.
        non_embedding: without token embeddings, the output layer and learned positions (Kaplan et al., 2020).
        shift: the weights of the shift: of the paper's, 4 per key/value head and layer.
        multiplied: those that every token is multiplied by: matrices of blocks, and the output layer's.
        block: of one block.
    """

    total: int
    non_embedding: int
    shift: int
    multiplied: int
    block: int


def count_parameters(config: KeyshiftConfig) -> Counts:
    """Count without taking memory."""
    import torch
    from torch import nn

    from keyshift.attention.shift import Shift
    from keyshift.modeling import KeyshiftForCausalLM

    def within(model: nn.Module, *kinds: type[nn.Module]) -> int:
        found = [module for module in model.modules() if isinstance(module, kinds)]
        return sum(parameter.numel() for module in found for parameter in module.parameters(recurse=False))

    with torch.device("meta"):
        model = KeyshiftForCausalLM(config)
    total, head = model.num_parameters(), model.lm_head.weight.numel()
    outside = within(model, nn.Embedding) + (0 if config.tie_word_embeddings else head)
    shift = within(model, Shift)
    inner = total - outside
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if name.endswith("bias"))
    multiplied = inner - shift - within(model, nn.RMSNorm) - added + head
    return Counts(total, inner, shift, multiplied, block)


def flops_per_token(
    config: KeyshiftConfig, sequence_length: int, teacher: KeyshiftConfig | None = None
) -> int:
    """FLOPs that training needs for a token: 6 N + 6 L T H (d_qk + d_h); of a teacher, a third as much.

    N are the parameters that a token is multiplied by (2 FLOPs each, and twice that backward); the other term
    is scores and their weighted sum of values, over the whole square: kernels that leave out what the causal
    mask hides do half of it, and their MFU is that of the whole, as usual (PaLM, appendix B). Not counted are
    what takes no products (shift, norms, softmax), what is computed again for gradient checkpointing, and the
    zeros that values are padded with where d_qk is wider than d_h.
    """
    widths = config.qk_head_dim + config.head_dim
    attention = config.num_hidden_layers * sequence_length * config.num_attention_heads * widths
    forward = 0 if teacher is None else flops_per_token(teacher, sequence_length) // 3
    return 6 * (count_parameters(config).multiplied + attention) + forward


def budget(
    config: KeyshiftConfig,
    training: Training,
    engine: Engine,
    *,
    name: str,
    sequence_length: int,
    world_size: int,
    half: bool,
    teacher: KeyshiftConfig | None = None,
    timed: StepTime | None = None,
) -> dict[str, Any]:
    """Everything about one variant's run, of JSON values; bytes are those of one process.

    Args:
        name: the variant's.
        half: products in bfloat16.
        teacher: the model that it is distilled from, if there is one.
        timed: a step's time; None leaves it open.
    """
    import torch

    from keyshift.cache import cache_bytes_per_token

    counts = count_parameters(config)
    tokens_per_step = training.batch_size * sequence_length
    flops = flops_per_token(config, sequence_length, teacher)
    rows = micro_batch_rows(training, engine, world_size)
    memory = memory_bytes(
        config,
        engine,
        trained=training.trained,
        rows=rows,
        sequence_length=sequence_length,
        world_size=world_size,
        half=half,
    )
    if teacher is not None:
        memory["teacher"] = teacher_bytes(teacher, training, rows * sequence_length, half)
    seconds = None
    if timed is not None and timed.micro_batch is not None and timed.update is not None:
        seconds = timed.micro_batch * training.batch_size / (rows * world_size) + timed.update
    return {
        "variant": name,
        "parameters": counts.total,
        "non_embedding_parameters": counts.non_embedding,
        "shift_parameters": counts.shift,
        "flops_per_token": flops,
        "steps": training.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": training.steps * tokens_per_step,
        "flops": training.steps * tokens_per_step * flops,
        "processes": world_size,
        "micro_batch_rows": rows,
        **{f"{what}_bytes": size for what, size in memory.items()},
        "memory_bytes": sum(memory.values()),
        "cache_bytes_per_token": cache_bytes_per_token(config, torch.bfloat16),
        "step_seconds": seconds,
        "run_seconds": None if seconds is None else seconds * training.steps,
        "not_timed": None if timed is None else timed.why_not,
    }


def micro_batch_rows(training: Training, engine: Engine, world_size: int) -> int:
    """Rows that a process computes at a time."""
    return engine.micro_batch_size or max(1, training.batch_size // world_size)


def memory_bytes(
    config: KeyshiftConfig,
    engine: Engine,
    *,
    trained: Literal["all", "shift"] = "all",
    rows: int,
    sequence_length: int,
    world_size: int,
    half: bool,
) -> dict[str, int]:
    """Bytes of one process, which computes ``rows`` at a time, by what they hold.

    ``weights``, ``gradients`` and ``optimizer`` are exact. ``copies`` are weights in the products' type, of
    all where autocast makes them, of what is gathered at a time with FSDP2 (two blocks, embedding, output
    layer); and the gradients in the buckets that are sent, where several processes each hold the model.
    ``activations`` are what the CPU's kernels keep for the backward pass, which itself comes on top.
    """
    from keyshift.training.activations import saved_bytes

    counts = count_parameters(config)
    sharded = engine.parallel == "fsdp"
    saved = saved_bytes(
        config,
        rows=rows,
        sequence_length=sequence_length,
        half=half,
        sharded=sharded,
        recompute=engine.gradient_checkpointing,
    )
    moved = counts.shift if trained == "shift" else counts.total
    own, own_moved = (-(-count // world_size) if sharded else count for count in (counts.total, moved))
    copies = saved.casts
    if sharded:
        outside = counts.total - config.num_hidden_layers * counts.block
        copies += (outside + 2 * counts.block) * (2 if half else FLOAT32)
    elif world_size > 1:
        copies += moved * FLOAT32
    return {
        "weights": own * FLOAT32,
        "gradients": own_moved * FLOAT32,
        "optimizer": 2 * own_moved * FLOAT32,
        "copies": copies,
        "activations": saved.activations,
    }


def teacher_bytes(teacher: KeyshiftConfig, training: Training, tokens: int, half: bool) -> int:
    """Bytes of the model that another one is distilled from, which every process holds whole.

    Beside its weights, for ``tokens`` at a time, what its attention gave and how far the other one's is from
    it (float32), where that counts.
    """
    size = 2 if half else FLOAT32
    outputs = teacher.num_hidden_layers * tokens * teacher.hidden_size * (size + FLOAT32)
    compared = outputs if training.distil_attention > 0 else 0
    return count_parameters(teacher).total * size + compared


LINES: dict[str, str] = {
    "parameters": "parameters",
    "non_embedding_parameters": "  no embeddings",
    "shift_parameters": "  of the shift",
    "flops_per_token": "FLOPs/token",
    "tokens_per_step": "tokens/step",
    "steps": "steps",
    "tokens": "tokens",
    "flops": "FLOPs",
    "processes": "processes",
    "micro_batch_rows": "rows at a time",
    "memory_bytes": "memory, GiB each",
    "weights_bytes": "  weights",
    "gradients_bytes": "  gradients",
    "optimizer_bytes": "  AdamW's moments",
    "copies_bytes": "  copies",
    "activations_bytes": "  activations",
    "teacher_bytes": "  teacher",
    "cache_bytes_per_token": "bf16 cache, B/tok",
    "step_seconds": "seconds/step",
    "run_seconds": "hours in all",
}
"""The lines of the table: what `budget` calls it, and what it is for readers."""

COLUMNS = 5
"""Variants side by side in 80 columns."""


def print_budget(budgets: Sequence[dict[str, Any]], console: Console) -> None:
    """Print budgets as a table with a column per variant, within 80 columns."""
    from rich.table import Table
    from rich.text import Text

    for first in range(0, len(budgets), COLUMNS):
        shown = budgets[first : first + COLUMNS]
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("")
        for each in shown:
            table.add_column(Text(each["variant"]), justify="right", overflow="fold", max_width=11)
        for key, title in LINES.items():
            cells = [_cell(key, each.get(key)) for each in shown]
            if any(cell != "–" for cell in cells):
                table.add_row(title, *cells)
        console.print(table)
        console.print()
    for reason in dict.fromkeys(each["not_timed"] for each in budgets if each["not_timed"]):
        names = [each["variant"] for each in budgets if each["not_timed"] == reason]
        who = "no step was timed" if len(names) == len(budgets) else f"{', '.join(names)}: not timed"
        console.print(Text(f"{who}: {reason}"))


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "–"
    if key == "run_seconds":
        return f"{value / 3600:,.3g}"
    if key == "cache_bytes_per_token":
        return f"{value:,}"
    if key.endswith("_bytes"):
        return f"{value / 2**30:.3g}" if value >= 2**20 else "<0.001"
    if value < 100_000:
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    for size, suffix in ((1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T")):
        if value < 999.5 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.1e}"

"""How long a training step takes on this machine: one is computed and timed, where that is possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from keyshift.attention.shift import train_only_shifts_
from keyshift.configuration import KeyshiftConfig
from keyshift.memory import free_memory
from keyshift.recipe import Engine, Training
from keyshift.training.activations import recompute_activations_
from keyshift.training.budget import flops_per_token, memory_bytes, micro_batch_rows, teacher_bytes
from keyshift.training.distillation import Distillation

ROUNDS = 3
"""Timed passes after one that warms up; the fastest counts."""

PATIENCE = 60.0
"""Seconds that a pass may be expected to take."""

PROBE = 1024
"""Rows and columns of the product that tells what the machine can do."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one process, or why they are not known.

    Attributes:
        micro_batch: forward and backward pass of one micro-batch.
        update: AdamW's step. What processes tell each other is in neither.
        why_not: None if both are known.
    """

    micro_batch: float | None = None
    update: float | None = None
    why_not: str | None = None


def time_step(
    config: KeyshiftConfig,
    training: Training,
    engine: Engine,
    *,
    sequence_length: int,
    world_size: int,
    half: bool,
    teacher: KeyshiftConfig | None = None,
) -> StepTime:
    """Time one process's share of a step on this machine's GPU, or CPU without one.

    Random tokens, a model with fresh weights, nothing compiled. Not timed is what would not fit into the
    memory that is free, or would take longer than `PATIENCE`: the result says so.

    Args:
        teacher: the model that it is distilled from, if there is one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = micro_batch_rows(training, engine, world_size)
    alone = engine.model_copy(update={"parallel": "ddp"})  # a share of a sharded model does not run by itself
    needed = sum(
        memory_bytes(
            config,
            alone,
            trained=training.trained,
            rows=rows,
            sequence_length=sequence_length,
            world_size=1,
            half=half,
        ).values()
    )
    if teacher is not None:
        needed += teacher_bytes(teacher, training, rows * sequence_length, half)
    free = _free_bytes(device)
    if needed > free:
        return StepTime(why_not=f"one needs {needed / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free here")
    flops = flops_per_token(config, sequence_length, teacher) * rows * sequence_length
    expected = flops / _rate(device, half)
    if expected > PATIENCE:
        return StepTime(
            why_not=f"{rows} rows would take some {expected / 60:.3g} minutes on this {device.type}"
        )
    return _timed(config, training, alone, rows, sequence_length, device, half, teacher)


def _timed(
    config: KeyshiftConfig,
    training: Training,
    engine: Engine,
    rows: int,
    sequence_length: int,
    device: torch.device,
    half: bool,
    teacher: KeyshiftConfig | None,
) -> StepTime:
    from keyshift.modeling import KeyshiftForCausalLM

    with device:
        model = KeyshiftForCausalLM(config).train()
        ids = torch.randint(config.vocab_size, (rows, sequence_length))
    if training.trained == "shift":
        train_only_shifts_(model)
    if engine.gradient_checkpointing:
        recompute_activations_(model)
    distillation = None
    if teacher is not None:
        with device:
            taught_by = KeyshiftForCausalLM(teacher).to(torch.bfloat16 if half else torch.float32)
        distillation = Distillation(taught_by, training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=half)

    def micro_batch() -> None:
        batch = {"input_ids": ids, "labels": ids}
        with cast:
            if distillation is None:
                loss = model(**batch, use_cache=False).loss
            else:
                loss = distillation.loss(model, model, batch, ids.numel())
        loss.backward()

    return StepTime(_fastest(micro_batch, device), _fastest(optimizer.step, device))


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some rounds."""
    taken = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _rate(device: torch.device, half: bool) -> float:
    """FLOPs per second of a large product here."""
    factor = torch.randn(PROBE, PROBE, device=device, dtype=torch.bfloat16 if half else torch.float32)
    return 2 * PROBE**3 / _fastest(lambda: factor @ factor, device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return free_memory()

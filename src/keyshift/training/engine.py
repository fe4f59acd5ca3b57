"""One training engine for everything: transformers' Trainer on one process or many, as recipes want it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PrinterCallback, TrainingArguments

from keyshift.attention.shift import train_only_shifts_
from keyshift.errors import UserError
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.recipe import Engine, Training
from keyshift.training.activations import recompute_activations_
from keyshift.training.checkpoints import (
    OWN_STATE,
    SHARDS,
    check_readable,
    check_same_data,
    clear_leftovers,
    load_weights_,
    newest_checkpoint,
)
from keyshift.training.distillation import Distillation
from keyshift.training.lines import Lines
from keyshift.training.probe import FILE as PROBES
from keyshift.training.probe import Probe
from keyshift.training.processes import (
    check_processes,
    is_first,
    launched,
    shard_,
    uses_bfloat16,
    wait_for_all,
)
from keyshift.training.sources import BatchSource
from keyshift.training.trainer import KeyshiftTrainer, MicroBatches
from keyshift.training.watch import Progress, Watch

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}

TRACKERS = ("tensorboard", "trackio", "wandb")
"""Where metrics can go beside ``metrics.jsonl``, through transformers' own callbacks."""

MATCHED_ROWS = 512
"""Keys are matched to queries on so many rows of the first batch at most."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        steps: optimiser steps taken in all, over resumed parts.
        interrupted: ``stop`` asked for the end; a checkpoint was saved.
        history: what was logged: dictionaries with ``step`` and ``loss`` or ``eval_*``.
        step_seconds: median wall time of an optimiser step without data, evaluation and saving.
        skipped: how many steps were left out (`Training.unstable`).
    """

    steps: int
    interrupted: bool
    history: list[dict[str, float]]
    step_seconds: float | None
    skipped: int = 0


def train(
    model: KeyshiftForCausalLM,
    source: BatchSource,
    settings: Training,
    directory: Path,
    *,
    seed: int,
    engine: Engine | None = None,
    resume: bool = False,
    trackers: Sequence[str] = (),
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Train ``model`` in place and leave its newest checkpoint in ``directory``.

    Processes that torchrun started train together, each on its share of every batch; all must call. The
    first one writes. Losses and gradients are means over all labels that count, whichever process has them.

    Args:
        source: the data; batch ``step`` of ``seed`` is the same whatever happened before.
        directory: holds ``checkpoint-N`` folders in transformers' layout, each a loadable model, and
            ``metrics.jsonl``: a line for everything that was logged.
        resume: go on from the newest checkpoint, if there is one. On one CPU process, and on two, the result
            is bit-equal to an uninterrupted run.
        trackers: some of `TRACKERS`.
        stop: asked after every step; True in any process saves a checkpoint and ends the run in all.

    Raises:
        NonFiniteLoss: the loss or a weight is NaN or infinite, or the loss is a spike, and
            ``settings.unstable`` does not skip it.
        RunError: a checkpoint cannot be written; the previous one is intact.
        UserError: the checkpoint to resume from cannot be read, a batch cannot be shared out evenly, other
            processes than ``engine`` wants.
    """
    engine = engine or Engine()
    check_before(settings, engine, trackers)
    arguments = _arguments(settings, engine, directory, seed, list(trackers))
    check_processes(engine, arguments.world_size)
    arguments.gradient_accumulation_steps = _accumulation(settings, engine)
    if is_first():
        clear_leftovers(directory)
    checkpoint = newest_checkpoint(directory) if resume else None
    _prepare(model, source, settings, engine, checkpoint, arguments.device, seed)
    dtype = torch.bfloat16 if uses_bfloat16(engine) else torch.float32
    distillation = Distillation.of(settings, source.tokenizer_path, arguments.device, dtype)
    trainer = KeyshiftTrainer(model, source, settings, engine, arguments, directory, seed, distillation)
    watch = Watch(trainer, stop, on_progress)
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)
    files = [trainer.metrics]
    if settings.probe_steps is not None:
        files.append(Lines(directory / PROBES, writing=is_first()))
        trainer.add_callback(Probe(trainer, settings.probe_steps, files[-1]))
    if checkpoint is not None:
        _restore(trainer, checkpoint)
    elif distillation is not None:
        first = cast(MicroBatches, trainer.train_dataset)
        distillation.measure(first[index] for index in range(first.accumulation))
    for file in files:
        file.keep_until(trainer.first_step)
    if checkpoint is not None and _reached(checkpoint, settings):  # its result was lost, not its end
        load_weights_(model, checkpoint)
        history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
        return Outcome(trainer.first_step, False, history, None, trainer.guard.skipped)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    wait_for_all()
    state = trainer.state
    return Outcome(
        state.global_step, watch.stopped, list(state.log_history), watch.step_seconds(), trainer.guard.skipped
    )


def _prepare(
    model: KeyshiftForCausalLM,
    source: BatchSource,
    settings: Training,
    engine: Engine,
    checkpoint: Path | None,
    device: torch.device,
    seed: int,
) -> None:
    """Everything that is done to a model before it is trained: start, memory, compilation, shares."""
    if checkpoint is not None:
        check_readable(checkpoint)
        check_same_data(checkpoint, source.fingerprint)
        if (checkpoint / SHARDS).is_dir() != (engine.parallel == "fsdp"):
            raise UserError(
                f"engine.parallel={engine.parallel!r}: {checkpoint} was saved the other way; resume it so"
            )
    elif model.config.key_map_init == "matched" and settings.start_from is None:
        first = source.train_batch(seed, 0, settings.batch_size)
        rows = {name: tensor[:MATCHED_ROWS] for name, tensor in first.items() if name != "labels"}
        model.to(device).match_keys_(**{name: tensor.to(device) for name, tensor in rows.items()})
    if settings.trained == "shift":
        train_only_shifts_(model)
    if engine.gradient_checkpointing:
        recompute_activations_(model)
    blocks: Sequence[nn.Module] = list(model.model.layers)
    if engine.compile:
        for block in blocks:  # in place: names of weights stay; block by block: equal ones compile once
            block.compile()
    if engine.parallel == "fsdp":
        if checkpoint is not None:
            load_weights_(model, checkpoint)
        dtype = torch.bfloat16 if uses_bfloat16(engine) else torch.float32
        shard_(model, blocks, device, dtype)
        model._is_accelerate_prepared = True  # accelerate would wrap it once more


def _restore(trainer: KeyshiftTrainer, checkpoint: Path) -> None:
    """What the checkpoint says beside what transformers' Trainer reads itself."""
    trainer.first_step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    kept = checkpoint / OWN_STATE
    if kept.exists():
        own = json.loads(kept.read_text())
        trainer.guard.load_state_dict(own["guard"])
        if own.get("source") is not None:
            cast(Any, trainer.source).load_state_dict(own["source"])
        if trainer.distillation is not None:
            trainer.distillation.load_state_dict(own.get("distillation", {}))


def _reached(checkpoint: Path, settings: Training) -> bool:
    """Whether the run ended here because it was accurate enough."""
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    accuracies = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
    wanted = settings.until_accuracy
    return wanted is not None and bool(accuracies) and accuracies[-1] >= wanted


def _accumulation(settings: Training, engine: Engine) -> int:
    """How many micro-batches a process computes for a step.

    Raises:
        UserError: a batch that cannot be shared out evenly.
    """
    rows, processes = settings.batch_size, launched()
    if rows % processes:
        raise UserError(
            f"training.batch_size={rows} cannot be shared out evenly over {processes} processes; "
            f"use a multiple of {processes}"
        )
    share = rows // processes
    micro = engine.micro_batch_size or share
    if share % micro:
        raise UserError(
            f"engine.micro_batch_size={micro} does not divide the {share} rows that each of {processes} "
            f"processes has of training.batch_size={rows}"
        )
    return share // micro


def check_before(settings: Training, engine: Engine, trackers: Sequence[str]) -> None:
    """What can be refused before any text is read.

    Raises:
        UserError: a tracker that is unknown or not installed, a batch that cannot be shared out evenly, other
            processes than ``engine`` wants.
    """
    for name in trackers:
        if name not in TRACKERS:
            raise UserError(f"tracker {name!r} is not known; use some of {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise UserError(f"tracker {name!r} is not installed; pip install {name}")
    check_processes(engine, launched())
    _accumulation(settings, engine)


def _arguments(
    settings: Training, engine: Engine, directory: Path, seed: int, trackers: list[str]
) -> TrainingArguments:
    """transformers' settings. Creating them connects the processes."""
    if "tensorboard" in trackers:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(directory / "tensorboard"))
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # micro-batches, not sequences: see trainer.MicroBatches
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,  # not None, nor 0: see trainer.KeyshiftTrainer._clip_grad_norm
        logging_strategy="no",  # it would log means since the last resumption: see Watch.on_step_end
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        save_strategy="steps",
        save_steps=settings.save_steps,
        seed=seed,
        data_seed=seed,
        bf16=uses_bfloat16(engine) and engine.parallel == "ddp",
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=trackers,
        project="keyshift",
        run_name="/".join(directory.parts[-2:]),  # runs/VARIANT/seed-N
        trackio_static_space_id=False,  # trackio would publish the run on the hub once it is over
    )
    if arguments.n_gpu > 1:  # one process would split every batch over all of them
        arguments._n_gpu = 1
    return arguments

"""One training engine for everything: transformers' Trainer, with atomic checkpoints and a watch for NaN."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import statistics
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from keyshift.attention.shift import Shift
from keyshift.errors import NonFiniteLoss, RunError, UserError, first_line
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.recipe import Training
from keyshift.training.sources import Batch, BatchSource

LOGGING_STEPS = 10
"""How often a step's training loss is logged: that step's own, so that it does not depend on resumptions."""

SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


@dataclass(frozen=True)
class Progress:
    """Where a run stands: ``metrics`` holds the latest loss, held-out loss and accuracy that are known."""

    step: int
    metrics: dict[str, float]


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        steps: optimiser steps taken in all, over resumed parts.
        interrupted: ``stop`` asked for the end; a checkpoint was saved.
        history: what the Trainer logged: dictionaries with ``step`` and ``loss`` or ``eval_*``.
        step_seconds: median wall time of an optimiser step without data, evaluation and saving.
    """

    steps: int
    interrupted: bool
    history: list[dict[str, float]]
    step_seconds: float | None


def train(
    model: KeyshiftForCausalLM,
    source: BatchSource,
    settings: Training,
    directory: Path,
    *,
    seed: int,
    resume: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcome:
    """Train ``model`` in place and leave its newest checkpoint in ``directory``.

    Args:
        source: the data; batch ``step`` of ``seed`` is the same whatever happened before.
        directory: holds ``checkpoint-N`` folders in transformers' layout, each a loadable model.
        resume: go on from the newest checkpoint, if there is one. On one CPU process the result is bit-equal
            to an uninterrupted run.
        stop: asked after every step; True saves a checkpoint and ends the run.

    Raises:
        NonFiniteLoss: the loss or a weight is NaN or infinite.
        RunError: a checkpoint cannot be written; the previous one is intact.
        UserError: the checkpoint to resume from cannot be read.
    """
    trainer = _KeyshiftTrainer(model, source, settings, directory, seed)
    watch = _Watch(trainer, stop, on_progress)
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)
    checkpoint = newest_checkpoint(directory) if resume else None
    if checkpoint is None and model.config.key_map_init == "matched":
        first = source.train_batch(seed, 0, settings.batch_size)
        model.match_keys_(
            **{name: tensor.to(model.device) for name, tensor in first.items() if name != "labels"}
        )
    if checkpoint is not None:
        _check_readable(checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    state = trainer.state
    return Outcome(state.global_step, watch.stopped, list(state.log_history), watch.step_seconds())


def newest_checkpoint(directory: Path) -> Path | None:
    """The ``checkpoint-N`` folder with the largest N, or None."""
    found = [path for path in directory.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _check_readable(checkpoint: Path) -> None:
    """Read every file that resuming needs: what is missing or damaged is named now, not halfway."""
    try:
        with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
            weights.keys()
        for name in ("optimizer.pt", "scheduler.pt"):
            torch.load(checkpoint / name, map_location="cpu", weights_only=True)
        for name in ("config.json", "trainer_state.json"):
            json.loads((checkpoint / name).read_text())
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({first_line(error)}); delete it to resume from the "
            "start"
        ) from error


class _Steps(Dataset[Batch]):
    """The training batches as a dataset: item ``step`` is a whole batch."""

    def __init__(self, source: BatchSource, settings: Training, seed: int):
        self.source, self.settings, self.seed = source, settings, seed

    def __len__(self) -> int:
        return self.settings.steps

    def __getitem__(self, step: int) -> Batch:
        return self.source.train_batch(self.seed, step, self.settings.batch_size)


class _KeyshiftTrainer(Trainer):
    """The Trainer with our data order, evaluation, atomic checkpoints and checks for NaN."""

    def __init__(
        self,
        model: KeyshiftForCausalLM,
        source: BatchSource,
        settings: Training,
        directory: Path,
        seed: int,
    ):
        self.source, self.settings = source, settings
        self.step_loss = torch.tensor(torch.nan)
        self.staging = directory / ".saving"
        super().__init__(
            model=model,
            args=_arguments(settings, directory, seed),
            train_dataset=_Steps(source, settings, seed),
            eval_dataset=[],  # evaluate() below asks the source instead
            data_collator=_only,
        )

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW with the shift weights in a group of their own (`Training.shift_learning_rate`)."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        shifts = {id(m.weight) for m in self.model.modules() if isinstance(m, Shift)}
        settings = self.settings
        decay = settings.weight_decay if settings.shift_weight_decay is None else settings.shift_weight_decay
        own = {"lr": settings.learning_rate * settings.shift_learning_rate, "weight_decay": decay}
        mixing = []
        for group in optimizer.param_groups:
            mixing += [parameter for parameter in group["params"] if id(parameter) in shifts]
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in shifts]
        if mixing:
            optimizer.add_param_group({"params": mixing, **own})
        return optimizer

    def _get_train_sampler(self, train_dataset: Dataset[Batch] | None = None) -> SequentialSampler:
        return SequentialSampler(cast(Sized, train_dataset or self.train_dataset))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if not bool(torch.isfinite(loss)):
            raise self._not_finite(self.state.global_step + 1, f"loss is {loss.item()}")
        self.step_loss = loss
        return loss

    def _not_finite(self, step: int, what: str) -> NonFiniteLoss:
        return NonFiniteLoss(step, what, self.state.log_history)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.model.eval()
        measured = self.source.validate(self.model, self.settings.batch_size, self.settings.eval_batches)
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write beside, then rename: a checkpoint is there whole or not at all, and the last one stays till
        then."""
        step = self.state.global_step
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise self._not_finite(step, f"weight {name} is not finite")
        shutil.rmtree(self.staging, ignore_errors=True)
        try:
            super()._save_checkpoint(model, trial)
            if self.source.tokenizer_path is not None:
                shutil.copytree(
                    self.source.tokenizer_path, self.staging / f"checkpoint-{step}", dirs_exist_ok=True
                )
            self._publish(step)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise RunError(
                f"cannot save the checkpoint of step {step} in {self.staging.parent} ({first_line(error)}); "
                "the previous checkpoint is intact: free some space and pass --resume"
            ) from error
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)

    def _publish(self, step: int) -> None:
        directory = self.staging.parent
        fresh = directory / f"checkpoint-{step}"
        shutil.rmtree(fresh, ignore_errors=True)
        os.replace(self.staging / fresh.name, fresh)
        for old in directory.glob("checkpoint-*"):
            if old != fresh:
                shutil.rmtree(old)


def _only(batches: list[Batch]) -> Batch:
    """The collator: an item of the dataset is a batch already."""
    (batch,) = batches
    return batch


def _arguments(settings: Training, directory: Path, seed: int) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=settings.steps,
        per_device_train_batch_size=1,  # batches, not sequences: see _Steps
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,
        logging_strategy="no",  # it would log means since the last resumption: see _Watch.on_step_end
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        save_strategy="steps",
        save_steps=settings.save_steps,
        seed=seed,
        data_seed=seed,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
    )
    if arguments.n_gpu > 1:  # one process would split every batch over all of them
        arguments._n_gpu = 1
    return arguments


@dataclass
class _Watch(TrainerCallback):
    """Progress out, requests to stop in, steps timed, clipped shift weights kept in range."""

    trainer: _KeyshiftTrainer
    stop: Callable[[], bool]
    on_progress: Callable[[Progress], None]
    stopped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    began: float = 0.0

    def step_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        getattr(model, "module", model).constrain_()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        if state.global_step % LOGGING_STEPS == 0:
            self.trainer.log({"loss": self.trainer.step_loss.item()})
        self.on_progress(Progress(state.global_step, self.metrics))
        last = state.global_step >= state.max_steps
        if last:
            control.should_evaluate = control.should_save = True
        elif self.stop():
            self.stopped = True
            control.should_save = control.should_training_stop = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        wanted = self.trainer.settings.until_accuracy
        if wanted is not None and metrics.get("eval_accuracy", 0.0) >= wanted:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        known = {name: value for name, value in logs.items() if name == "loss" or name.startswith("eval_")}
        self.metrics = {**self.metrics, **known}

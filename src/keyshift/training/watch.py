"""A training loop watched: progress out, requests to stop in, steps timed and logged."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from keyshift.training.budget import flops_per_token
from keyshift.training.peak import peak_flops
from keyshift.training.processes import anywhere, check_wrapping, launched, uses_bfloat16
from keyshift.training.trainer import KeyshiftTrainer

LOGGING_STEPS = 10
"""How often a step is logged, beside the first: its own loss, so that it does not depend on resumptions."""

SHOWN = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "skipped", "kl", "attention_error")
"""What of a logged step is shown while training goes on, beside evaluations."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands: ``metrics`` holds the latest loss, held-out loss and accuracy that are known."""

    step: int
    metrics: dict[str, float]


@dataclass
class Watch(TrainerCallback):
    """Progress out, requests to stop in, steps timed, clipped shift weights kept in range."""

    trainer: KeyshiftTrainer
    stop: Callable[[], bool]
    on_progress: Callable[[Progress], None]
    stopped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    began: float = 0.0
    since: float = 0.0
    """When work began that is not logged yet: evaluations and checkpoints do not count."""
    worked: float = 0.0
    steps: int = 0
    rate: float = 0.0
    peak: float | None = None
    """FLOPs a second that a process can do at most, where that is known."""
    flops: int = 0
    """Of a token."""

    def step_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_wrapping(self.trainer.engine, self.trainer.model_wrapped)
        self.since = time.perf_counter()
        if args.device.type == "cuda" and uses_bfloat16(self.trainer.engine):
            self.peak = peak_flops(torch.cuda.get_device_name())
            length, distillation = self.trainer.source.sequence_length, self.trainer.distillation
            teacher = None if distillation is None else distillation.teacher.config
            self.flops = flops_per_token(self.trainer.model.config, length, teacher)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        getattr(model, "module", model).constrain_()
        self.rate = self.trainer.lr_scheduler.get_last_lr()[0]  # of this step: the next one's comes after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.worked += now - self.since
        self.since = now
        self.steps += 1
        if state.global_step == 1 or state.global_step % LOGGING_STEPS == 0:
            self._log_step()
        self.on_progress(Progress(state.global_step, self.metrics))
        last = state.global_step >= state.max_steps
        if anywhere(not last and self.stop(), args.device):
            self.stopped = True
            control.should_save = control.should_training_stop = True
        elif last:
            control.should_evaluate = control.should_save = True

    def _log_step(self) -> None:
        trainer = self.trainer
        tokens = trainer.settings.batch_size * trainer.source.sequence_length
        entry = {
            "loss": trainer.step_loss,
            **trainer.step_parts,
            "grad_norm": trainer.step_norm,
            "learning_rate": self.rate,
            "tokens_per_second": self.steps * tokens / self.worked,
        }
        if self.peak is not None:
            entry["mfu"] = entry["tokens_per_second"] * self.flops / (self.peak * launched())
        if trainer.guard.skipped:
            entry["skipped"] = trainer.guard.skipped
        trainer.log(entry)
        self.worked, self.steps = 0.0, 0

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        self.since = time.perf_counter()
        wanted = self.trainer.settings.until_accuracy
        if wanted is not None and metrics.get("eval_accuracy", 0.0) >= wanted:
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        known = {name: value for name, value in logs.items() if name in SHOWN or name.startswith("eval_")}
        self.metrics = {**self.metrics, **known}

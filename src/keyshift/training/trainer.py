"""transformers' Trainer with our data order, evaluation, clipping, metrics and atomic checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sized
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments

from keyshift.attention.shift import shift_parameters
from keyshift.errors import NonFiniteLoss, RunError, first_line
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.recipe import Engine, Training
from keyshift.training.checkpoints import (
    OWN_STATE,
    STAGING,
    gathered_weights,
    load_shards_,
    newest_checkpoint,
    publish,
    save_shards,
)
from keyshift.training.distillation import Distillation
from keyshift.training.guard import Guard
from keyshift.training.lines import Lines
from keyshift.training.processes import anywhere, is_first, launched, total, wait_for_all
from keyshift.training.sources import Batch, BatchSource


class MicroBatches(Dataset[Batch]):
    """What this process computes, in order: item ``i`` is micro-batch ``i % accumulation`` of its share of
    step ``i // accumulation``. A pure function of the seed and of ``i``.
    """

    def __init__(
        self, source: BatchSource, settings: Training, seed: int, *, rank: int, world: int, accumulation: int
    ):
        self.steps, self.accumulation = settings.steps, accumulation
        self.rows = settings.batch_size // world // accumulation
        self.first = rank * self.rows * accumulation
        # One step at a time: its micro-batches are parts of one batch.
        self.batch = lru_cache(maxsize=1)(lambda step: source.train_batch(seed, step, settings.batch_size))

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __getitem__(self, index: int) -> Batch:
        step, part = divmod(index, self.accumulation)
        first = self.first + part * self.rows
        return {name: tensor[first : first + self.rows] for name, tensor in self.batch(step).items()}


class KeyshiftTrainer(Trainer):
    """The Trainer for a recipe's settings. ``first_step`` is where it goes on, if it was resumed."""

    def __init__(
        self,
        model: KeyshiftForCausalLM,
        source: BatchSource,
        settings: Training,
        engine: Engine,
        arguments: TrainingArguments,
        directory: Path,
        seed: int,
        distillation: Distillation | None = None,
    ):
        self.source, self.settings, self.engine = source, settings, engine
        self.distillation = distillation
        self.step_parts: dict[str, float] = {}
        self.sharded = engine.parallel == "fsdp"
        self.guard = Guard(settings)
        self.metrics = Lines(directory / "metrics.jsonl", writing=is_first())
        self.first_step = 0
        self.step_loss = self.step_norm = torch.nan
        self.sum_of_losses = torch.zeros((), device=arguments.device)
        self.staging = directory / STAGING
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=MicroBatches(
                source,
                settings,
                seed,
                rank=arguments.process_index,
                world=arguments.world_size,
                accumulation=arguments.gradient_accumulation_steps,
            ),
            eval_dataset=[],  # evaluate() below asks the source instead
            data_collator=_only,
        )

    def get_train_dataloader(self) -> DataLoader[Batch]:
        """Not prepared by accelerate, which would share out over processes what is shared out already."""
        dataset = self.train_dataset
        sampler = SequentialSampler(cast(Sized, dataset))
        return DataLoader(dataset, batch_size=1, sampler=sampler, collate_fn=_only)

    def create_optimizer(self, model: Any = None) -> Any:
        """AdamW with the shift weights in a group of their own (`Training.shift_learning_rate`)."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        shifts = {id(weight) for weight in shift_parameters(self.model)}
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

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.sharded:  # gradients travel once per step
            self.model.set_requires_gradient_sync(self.accelerator.sync_gradients)
        loss = super().training_step(*args, **kwargs)
        self.sum_of_losses += loss  # each a share of the step's mean, times the number of processes
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The cross-entropy that the model gives, unless there is a teacher."""
        if self.distillation is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss = self.distillation.loss(model, self.model, inputs, num_items_in_batch)
        return loss * launched()  # gradients become means over processes

    def _clip_grad_norm(self, model: Any) -> float:
        """Judge the step and clip its gradients; called once they are complete. Returns their true norm."""
        self.step_loss = float(total(self.sum_of_losses)) / launched()
        self.sum_of_losses.zero_()
        if self.distillation is not None:
            self.step_parts = self.distillation.parts()
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        step = self.state.global_step + 1
        verdict = self.guard.judge(self.step_loss, parameters, step)
        self.step_norm = verdict.norm
        if verdict.stop is not None:
            raise self._not_finite(step, verdict.stop)
        if verdict.skip:
            model.zero_grad(set_to_none=True)  # the optimiser passes over parameters without gradient
        return verdict.norm

    def _not_finite(self, step: int, what: str) -> NonFiniteLoss:
        return NonFiniteLoss(step, what, self.state.log_history)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.model.eval()
        measured = self.source.validate(self.model, self.settings.batch_size, self.settings.eval_batches)
        metrics = {f"eval_{name}": value for name, value in measured.items()}
        self.log(metrics)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs, start_time)
        if "train_runtime" in logs:  # transformers' sums over this part of the run
            return
        entry = self.state.log_history[-1]
        self.metrics.write({name: value for name, value in entry.items() if name != "epoch"})

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write beside, then rename: a checkpoint is there whole or not at all, and the last one stays till
        then. All processes write their part, and all fail if one does.
        """
        step = self.state.global_step
        broken = [n for n, p in self.model.named_parameters() if not bool(torch.isfinite(_own(p)).all())]
        if anywhere(bool(broken), self.args.device):
            raise self._not_finite(step, f"weight {(broken or ['of another process'])[0]} is not finite")
        if is_first():
            shutil.rmtree(self.staging, ignore_errors=True)
        wait_for_all()
        problem: Exception | None = None
        try:
            super()._save_checkpoint(model, trial)
            self._save_own(self.staging / f"checkpoint-{step}")
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = error
        try:
            if anywhere(problem is not None, self.args.device):
                raise problem or RuntimeError("another process could not write")
            if is_first():
                publish(self.staging / f"checkpoint-{step}", self.staging.parent)
            wait_for_all()
        except (OSError, RuntimeError, SafetensorError) as error:
            kept = newest_checkpoint(self.staging.parent)
            before = "there is none before it" if kept is None else f"{kept.name} is intact"
            raise RunError(
                f"cannot save the checkpoint of step {step} in {self.staging.parent} ({first_line(error)}); "
                f"{before}: free some space and resume"
            ) from error
        finally:
            if is_first():
                shutil.rmtree(self.staging, ignore_errors=True)

    def _save_own(self, checkpoint: Path) -> None:
        """What makes a checkpoint whole beside what transformers' Trainer saves."""
        if not is_first():
            return
        if self.source.tokenizer_path is not None:
            shutil.copytree(self.source.tokenizer_path, checkpoint, dirs_exist_ok=True)
        state_of = getattr(self.source, "state_dict", None)
        place = None if state_of is None else state_of(self.state.global_step, self.settings.batch_size)
        state = {"guard": self.guard.state_dict(), "source": place, "data": self.source.fingerprint}
        if self.distillation is not None:
            state["distillation"] = self.distillation.state_dict()
        (checkpoint / OWN_STATE).write_text(json.dumps(state))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        weights = gathered_weights(self.model)  # in which all processes take part
        if is_first():
            self._save(output_dir, weights)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_shards(self.model, self._bare_optimizer(), Path(output_dir))
        if is_first():
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.sharded:  # else they were loaded before they were shared out
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if self.sharded:
            load_shards_(self.model, self._bare_optimizer(), folder)
        else:  # transformers 5.16 cannot do it for several processes on a CPU
            state = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser without accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))


def _only(batches: list[Batch]) -> Batch:
    """The collator: an item of the dataset is a batch already."""
    (batch,) = batches
    return batch


def _own(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process holds."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter

"""What a comparison shows while it runs: a bar per run, rates, the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from keyshift.recipe import Recipe

if TYPE_CHECKING:
    from keyshift.compare import Hooks, Run
    from keyshift.results import RunResult
    from keyshift.training import Progress as Standing


@contextmanager
def follow(recipe: Recipe, console: Console, stop: Callable[[], bool]) -> Iterator[Hooks]:
    """Show progress on ``console`` for as long as the context lasts; the hooks feed it."""
    from transformers.utils import logging

    from keyshift.compare import Hooks

    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        display = _Display(recipe, bars, console)
        yield Hooks(
            stop=stop, preparing=display.preparing, progress=display.progress, finished=display.finished
        )


@dataclass
class _Display:
    recipe: Recipe
    bars: Progress
    console: Console
    tasks: dict[tuple[str, int], TaskID] = field(default_factory=dict)
    reading: TaskID | None = None
    overall: TaskID | None = None
    began: float = field(default_factory=time.monotonic)
    mark: tuple[float, int] = (0.0, 0)

    def preparing(self, done: int, total: int) -> None:
        if self.reading is None:
            self.reading = self.bars.add_task("reading text", total=total, rates="bytes")
        self.bars.update(self.reading, completed=done, total=total, visible=done < total)

    def progress(self, run: Run, standing: Standing) -> None:
        key = (run.variant, run.seed)
        steps = self.recipe.training.steps
        if self.overall is None:
            runs = self.recipe.seeds * len(self.recipe.variants)
            self.overall = self.bars.add_task("all runs", total=runs * steps, rates="")
        if key not in self.tasks:
            name = f"{run.variant}, seed {run.seed}"
            self.tasks[key] = self.bars.add_task(name, total=steps, completed=standing.step - 1, rates="")
            self.mark = (time.monotonic(), standing.step - 1)
        self.bars.update(self.tasks[key], completed=standing.step, rates=self._rates(standing))
        self.bars.advance(self.overall)

    def _rates(self, standing: Standing) -> str:
        since, first = self.mark
        per_second = (standing.step - first) / max(1e-9, time.monotonic() - since)
        tokens = per_second * self.recipe.training.batch_size * self._sequence_length()
        shown = {"eval_accuracy": "acc", "eval_loss": "val", "loss": "loss"}
        names = [
            f"{short} {standing.metrics[name]:.3f}"
            for name, short in shown.items()
            if name in standing.metrics
        ]
        return " ".join([f"{per_second:.1f}/s", f"{tokens / 1e3:.0f}k tok/s", *names[:1], *names[2:]])

    def _sequence_length(self) -> int:
        if self.recipe.data is not None:
            return self.recipe.data.sequence_length
        from keyshift.recipe import build_task

        return build_task(self.recipe.task or {}).sequence_length

    def finished(self, run: Run, result: RunResult) -> None:
        key = (run.variant, run.seed)
        if key in self.tasks:
            self.bars.remove_task(self.tasks.pop(key))
        last = result.curve[-1] if result.curve else None
        facts = [] if last is None else [f"loss {last.loss:.4f}"]
        if last is not None and last.accuracy is not None:
            facts.append(f"accuracy {last.accuracy:.1%}")
        if last is not None and last.bits_per_byte is not None:
            facts.append(f"{last.bits_per_byte:.3f} bits/byte")
        if result.train_tokens_per_second:
            facts.append(f"{result.train_tokens_per_second / 1e3:.0f}k tokens/s")
        minutes = (time.monotonic() - self.began) / 60
        self.console.print(
            f"[{minutes:5.1f} min] {run.variant}, seed {run.seed}: {result.status}; {', '.join(facts)}",
            markup=False,
            soft_wrap=True,
        )

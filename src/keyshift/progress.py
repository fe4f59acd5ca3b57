"""What long work shows while it runs: bars, rates, the time left."""

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


SILENCE = 30.0
"""Where there is no terminal to draw bars on, a line is printed after so many seconds without one."""


@contextmanager
def follow(recipe: Recipe, console: Console, stop: Callable[[], bool]) -> Iterator[Hooks]:
    """Show progress on ``console`` for as long as the context lasts; the hooks feed it."""
    from transformers.utils import logging

    from keyshift.compare import Hooks

    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        display = _Display(recipe, bars, console)
        yield Hooks(
            stop=stop,
            preparing=display.preparing,
            planned=display.planned,
            progress=display.progress,
            finished=display.finished,
        )


@contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar at a time for work in stages: call with what is being done, how much of it is, and of how
    much."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        running: dict[str, TaskID] = {}
        spoke = time.monotonic()

        def progress(what: str, done: int, total: int) -> None:
            if what not in running:
                for task in running.values():
                    bars.update(task, visible=False)
                running[what] = bars.add_task(what, total=total)
            bars.update(running[what], completed=done, total=total, visible=True)
            nonlocal spoke
            if not console.is_terminal and time.monotonic() - spoke > SILENCE:
                spoke = time.monotonic()
                console.print(f"{what}: {done} of {total}", markup=False, soft_wrap=True)

        yield progress


@dataclass
class _Display:
    recipe: Recipe
    bars: Progress
    console: Console
    began: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)
    spoke: float = field(default_factory=time.monotonic)
    reading: TaskID | None = None
    overall: TaskID | None = None
    current: TaskID | None = None
    runs: int = 0
    runs_done: int = 0
    first: tuple[float, int] = (0.0, 0)

    def preparing(self, done: int, total: int) -> None:
        if self.reading is None:
            self.reading = self.bars.add_task("reading text, %", total=100, rates="")
        self.bars.update(self.reading, completed=100 * done // max(1, total), visible=done < total)

    def planned(self, runs: int) -> None:
        self.runs = runs
        self.started = time.monotonic()
        self.overall = self.bars.add_task("all runs", total=runs * self.recipe.training.steps, rates="")

    def progress(self, run: Run, standing: Standing) -> None:
        steps, name = self.recipe.training.steps, f"{run.variant}, seed {run.seed}"
        if self.current is None:
            self.current = self.bars.add_task(name, total=steps, completed=standing.step, rates="")
            self.first = (time.monotonic(), standing.step)
        rates = self._rates(standing)
        self.bars.update(self.current, completed=standing.step, rates=rates)
        if self.overall is not None:
            self.bars.update(self.overall, completed=self.runs_done * steps + standing.step)
        if not self.console.is_terminal and time.monotonic() - self.spoke > SILENCE:
            done, total = self.runs_done * steps + standing.step, self.runs * steps
            left = (time.monotonic() - self.started) * (total / done - 1) / 60
            where = f"run {self.runs_done + 1}/{self.runs}, {name}, step {standing.step}/{steps}"
            self._say(f"{where}: {rates}, {left:.0f} min left")

    def _rates(self, standing: Standing) -> str:
        since, step = self.first
        per_second = (standing.step - step) / max(1e-9, time.monotonic() - since)
        tokens = per_second * self.recipe.training.batch_size * self._sequence_length()
        quality = "eval_accuracy" if "eval_accuracy" in standing.metrics else "eval_loss"
        shown = {"acc" if quality == "eval_accuracy" else "val": quality, "loss": "loss"}
        metrics = [
            f"{short} {standing.metrics[key]:.3f}" for short, key in shown.items() if key in standing.metrics
        ]
        rates = [f"{per_second:.1f}/s", f"{tokens / 1e3:.1f}k tok/s"] if standing.step > step else []
        return " ".join([*rates, *metrics])

    def _sequence_length(self) -> int:
        if self.recipe.data is not None:
            return self.recipe.data.sequence_length
        from keyshift.recipe import build_task

        return build_task(self.recipe.task or {}).sequence_length

    def finished(self, run: Run, result: RunResult) -> None:
        self.runs_done += 1
        if self.current is not None:
            self.bars.remove_task(self.current)
            self.current = None
        last = result.curve[-1] if result.curve else None
        facts = [] if last is None else [f"loss {last.loss:.4f}"]
        if last is not None and last.accuracy is not None:
            facts.append(f"accuracy {last.accuracy:.1%}")
        if last is not None and last.bits_per_byte is not None:
            facts.append(f"{last.bits_per_byte:.3f} bits/byte")
        if result.train_tokens_per_second:
            facts.append(f"{result.train_tokens_per_second / 1e3:.0f}k tok/s")
        self._say(f"{run.variant}, seed {run.seed}: {result.status}; {', '.join(facts)}")

    def _say(self, text: str) -> None:
        self.spoke = time.monotonic()
        minutes = (self.spoke - self.began) / 60
        self.console.print(f"[{minutes:5.1f} min] {text}", markup=False, soft_wrap=True)

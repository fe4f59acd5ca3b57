"""What long work shows while it runs: bars, rates, the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from keyshift.compare import Hooks
    from keyshift.results import RunResult
    from keyshift.runs import Run
    from keyshift.training import Progress as Standing


SILENCE = 30.0
"""Where there is no terminal to draw bars on, a line is printed after so many seconds without one."""


@contextmanager
def follow(console: Console, stop: Callable[[], bool]) -> Iterator[Hooks]:
    """Show progress on ``console`` for as long as the context lasts; the hooks feed it."""
    from transformers.utils import logging

    from keyshift.compare import Hooks

    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        display = _Display(bars, console)
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
        TextColumn("{task.description}", markup=False),
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


def fitting(facts: Sequence[str], room: int) -> str:
    """As many of the first facts as a line has room for beside a name, a bar, steps and time."""
    shown = ""
    for longer in accumulate(facts, "{} {}".format):
        if len(longer) <= room:
            shown = longer
    return shown


@dataclass
class _Display:
    bars: Progress
    console: Console
    began: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)
    spoke: float = field(default_factory=time.monotonic)
    reading: TaskID | None = None
    overall: TaskID | None = None
    runs: int = 0
    runs_done: int = 0
    steps: int = 0
    steps_done: int = 0
    current: dict[Run, _Current] = field(default_factory=dict)

    def preparing(self, done: int, total: int) -> None:
        if self.reading is None:
            self.reading = self.bars.add_task("reading text, %", total=100, rates="")
        self.bars.update(self.reading, completed=100 * done // max(1, total), visible=done < total)

    def planned(self, runs: Sequence[Run]) -> None:
        self.runs = len(runs)
        self.steps = sum(run.variant.training.steps for run in runs)
        self.started = time.monotonic()
        self.overall = self.bars.add_task("all runs", total=self.steps, rates="")

    def progress(self, run: Run, standing: Standing) -> None:
        steps = run.variant.training.steps
        if run not in self.current:
            bar = self.bars.add_task(run.name, total=steps, completed=standing.step, rates="")
            if not self.current and not self.steps_done:
                self.started = time.monotonic()  # starting processes says nothing about steps
            self.current[run] = _Current(bar, time.monotonic(), standing.step)
            self.steps -= standing.step  # those before are not trained here, if it was resumed
        current = self.current[run]
        current.step = standing.step
        rates = current.rates(standing, run.tokens_per_step)
        room = self.console.width - len(run.name) - 2 * len(str(self.steps)) - 25
        self.bars.update(current.bar, completed=standing.step, rates=fitting(rates, room))
        done = self.steps_done + sum(each.step - each.first for each in self.current.values())
        if self.overall is not None:
            self.bars.update(self.overall, completed=done, total=self.steps)
        if not self.console.is_terminal and time.monotonic() - self.spoke > SILENCE:
            left = (time.monotonic() - self.started) * (self.steps / max(1, done) - 1) / 60
            where = f"{self.runs_done}/{self.runs} runs done; {run.name}, step {standing.step}/{steps}"
            self._say(f"{where}: {', '.join([*rates, f'{left:.0f} min left'])}")

    def finished(self, run: Run, result: RunResult) -> None:
        self.runs_done += 1
        self.steps_done += run.variant.training.steps
        if run in self.current:
            current = self.current.pop(run)
            self.bars.remove_task(current.bar)
            self.steps_done -= current.first
        last = result.curve[-1] if result.curve else None
        facts = [] if last is None else [f"loss {last.loss:.4f}"]
        if last is not None and last.accuracy is not None:
            facts.append(f"accuracy {last.accuracy:.1%}")
        if last is not None and last.bits_per_byte is not None:
            facts.append(f"{last.bits_per_byte:.3f} bits/byte")
        if result.train_tokens_per_second:
            facts.append(f"{result.train_tokens_per_second / 1e3:.1f}k tok/s")
        if result.status == "failed":
            facts.append(str(result.message))
        self._say(f"{run.name}: {result.status}" + "; " * bool(facts) + ", ".join(facts))

    def _say(self, text: str) -> None:
        self.spoke = time.monotonic()
        minutes = (self.spoke - self.began) / 60
        self.console.print(f"[{minutes:5.1f} min] {text}", markup=False, soft_wrap=True)


@dataclass
class _Current:
    """A run under way: its bar, when it was first heard of and at which step, and where it is."""

    bar: TaskID
    since: float
    first: int
    step: int = 0

    def rates(self, standing: Standing, tokens_per_step: int) -> list[str]:
        """How fast it is and how well it does, what matters most first."""
        per_second = (standing.step - self.first) / max(1e-9, time.monotonic() - self.since)
        quality = "eval_accuracy" if "eval_accuracy" in standing.metrics else "eval_loss"
        shown = {"acc" if quality == "eval_accuracy" else "val": quality, "loss": "loss"}
        metrics = [
            f"{short} {standing.metrics[key]:.3f}" for short, key in shown.items() if key in standing.metrics
        ]
        tokens = per_second * tokens_per_step / 1e3
        if standing.step == self.first:
            return metrics
        return [f"{per_second:.1f}/s", *metrics[:1], f"{tokens:.1f}k tok/s", *metrics[1:]]

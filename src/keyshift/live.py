"""What one run shows while it trains: a line with its loss, rates and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from keyshift.progress import SILENCE, fitting

if TYPE_CHECKING:
    from keyshift.pretrain import Watching
    from keyshift.runs import Run
    from keyshift.training import Progress as Standing


@contextmanager
def follow_one(console: Console, stop: Callable[[], bool], *, speaking: bool) -> Iterator[Watching]:
    """Show a run on ``console`` for as long as the context lasts; ``speaking`` is False in all processes of a
    run but its first.
    """
    from transformers.utils import logging

    from keyshift.pretrain import Watching

    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=6),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    quiet = not (speaking and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=quiet) as bars:
        line = _Line(bars, console, speaking, stop)
        yield Watching(stop, line.preparing, line.planned, line.progress)


@dataclass
class _Line:
    bars: Progress
    console: Console
    speaking: bool
    stop: Callable[[], bool]
    began: float = field(default_factory=time.monotonic)
    spoke: float = field(default_factory=time.monotonic)
    reading: TaskID | None = None
    bar: TaskID | None = None
    steps: int = 0
    first: int | None = None
    started: float = 0.0
    room: int = 0

    def preparing(self, done: int, total: int) -> None:
        if self.stop():
            raise KeyboardInterrupt  # what is prepared so far is kept
        if self.reading is None:
            self.reading = self.bars.add_task("reading text, %", total=100, facts="")
        self.bars.update(self.reading, completed=100 * done // max(1, total), visible=done < total)
        self._say_rarely(f"reading text: {done / 1e6:.0f} MB of {total / 1e6:.0f}")

    def planned(self, run: Run) -> None:
        from keyshift.runs import parameters

        self.steps = run.variant.training.steps
        if self.speaking:
            self._say(f"{run.name}: {parameters(run.config):,} parameters, {_processes()}")
        self.bar = self.bars.add_task("", total=self.steps, facts="")  # what it is stands above
        self.room = self.console.width - 2 * len(str(self.steps)) - 22

    def progress(self, standing: Standing) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.started = standing.step, now
        facts = list(_facts(standing.metrics))
        assert self.bar is not None
        self.bars.update(self.bar, completed=standing.step, facts=fitting(facts, self.room))
        done = standing.step - self.first
        if done and self.speaking:
            left = (now - self.started) / done * (self.steps - standing.step) / 60
            where = f"step {standing.step}/{self.steps}"
            self._say_rarely(f"{where}: {', '.join([*facts, f'{left:.1f} min left'])}")

    def _say_rarely(self, text: str) -> None:
        """Where there is no terminal to draw on, a line every now and then."""
        now = time.monotonic()
        if self.speaking and not self.console.is_terminal and now - self.spoke > SILENCE:
            self._say(text)

    def _say(self, text: str) -> None:
        self.spoke = time.monotonic()
        minutes = (self.spoke - self.began) / 60
        self.console.print(f"[{minutes:5.1f} min] {text}", markup=False, soft_wrap=True)


def _processes() -> str:
    from keyshift.training import launched

    count = launched()
    return "1 process" if count == 1 else f"{count} processes"


def _facts(metrics: dict[str, float]) -> Iterator[str]:
    """The latest numbers in words, what matters most first."""
    shown = {
        "loss": "loss {:.3f}",
        "kl": "KL {:.3f}",
        "eval_loss": "val {:.3f}",
        "eval_accuracy": "acc {:.1%}",
        "mfu": "MFU {:.0%}",
        "grad_norm": "|g| {:.2f}",
        "learning_rate": "lr {:.1e}",
        "skipped": "skipped {:.0f}",
    }
    for name, form in shown.items():
        if name in metrics and not (name == "eval_loss" and "eval_accuracy" in metrics):
            yield form.format(metrics[name]).replace("e-0", "e-")
        if name == "eval_accuracy" and "tokens_per_second" in metrics:
            yield f"{metrics['tokens_per_second'] / 1e3:.1f}k tok/s"

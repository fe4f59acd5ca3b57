"""What several commands share: overrides, JSON on stdout, an orderly stop, a bar of bytes."""

from __future__ import annotations

import json
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from keyshift.errors import UserError


def setting(
    text: str, option: str = "--set", example: str = "training.learning_rate=3e-4"
) -> tuple[str, Any]:
    """``key=value`` with a TOML value; what is not TOML is a string."""
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise UserError(f"{option} {text!r} must look like {example}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def print_json(rows: Any) -> None:
    typer.echo(json.dumps(rows, indent=2))


def size(count: int) -> str:
    """Bytes for readers: 1.5 kB, 12.00 MB, 0.30 GB."""
    if count >= 1e8:
        return f"{count / 1e9:,.2f} GB"
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


class Interruption:
    """Ctrl-C, SIGTERM or a closed terminal asks for an orderly stop; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Interruption:
        asking = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            asking.append(signal.SIGHUP)
        self.before = {sig: signal.signal(sig, self._handle) for sig in asking}
        return self

    def __exit__(self, *exception: object) -> None:
        for sig, handler in self.before.items():
            signal.signal(sig, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def byte_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes with rate and time left for as long as the context lasts; asked to stop, it does."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from keyshift.progress import SILENCE

    columns = (
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with (
        Interruption() as stop,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars,
    ):
        task = bars.add_task("", total=None)
        spoke = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal spoke
            if stop():
                raise KeyboardInterrupt
            bars.update(task, completed=done, total=total or None)
            if not console.is_terminal and time.monotonic() - spoke > SILENCE:
                spoke = time.monotonic()
                console.print(f"{done / 1e6:,.0f} MB" + f" of {total / 1e6:,.0f}" * bool(total))

        yield progress

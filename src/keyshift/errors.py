"""The errors a user can cause. The command line prints them as one line and exits with code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """A mistake in what the user passed: names the argument, its value and what would work."""


class RunError(RuntimeError):
    """Something went wrong while running, through no mistake in the arguments: one line, exit code 1."""


class NonFiniteLoss(RunError):
    """Training produced a NaN or infinite loss or weight.

    ``step`` is the optimiser step at which it was seen, ``history`` what was logged until then.
    """

    def __init__(self, step: int, what: str, history: Sequence[dict[str, float]] = ()):
        super().__init__(
            f"{what} at step {step}: training stopped, the last good checkpoint is kept; "
            "a lower learning_rate or a longer warm-up may help"
        )
        self.step = step
        self.history = list(history)


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough to quote in one of ours; else its type."""
    return str(error).strip().split("\n", 1)[0][:200] or type(error).__name__


def nearest(name: str, valid: Iterable[str]) -> str:
    """A hint to append to an error about an unknown ``name``: the closest valid one, or all of them."""
    choices = sorted(valid)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid names: {', '.join(choices)}"

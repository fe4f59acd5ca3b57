"""The command line in the tests' own process, without the seconds that starting Python takes."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from keyshift import cli


class Done(NamedTuple):
    """How a command ended and what it printed, named as `subprocess` does."""

    returncode: int
    stdout: str
    stderr: str


def exit_code(patch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Of ``keyshift`` with these arguments, at a terminal of 80 columns; 0 where it ends without one."""
    patch.setattr(sys, "argv", ["keyshift", *map(str, arguments)])
    patch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    return code if isinstance(code, int) else int(code is not None)


def in_process(*arguments: object, cwd: Path | None = None) -> Done:
    """``keyshift`` with these arguments, in the folder ``cwd``."""
    out, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        if cwd is not None:
            patch.chdir(cwd)
        code = exit_code(patch, *arguments)
    return Done(code, out.getvalue(), errors.getvalue())

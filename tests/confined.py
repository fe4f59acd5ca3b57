"""Commands in a control group of their own, which ends them when they take more memory than it allows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

GROUPS = Path("/sys/fs/cgroup/memory")
"""Of version 1; root may make them."""


@contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """A group of ``size`` bytes, for `run_in`; skips the test where none can be made."""
    folder = GROUPS / f"keyshift-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(size))
    except OSError:
        pytest.skip("no control groups of version 1 to make here")
    yield folder
    folder.rmdir()


def run_in(group: Path, *arguments: object) -> subprocess.CompletedProcess[Any]:
    """This Python with ``arguments``, in a group."""
    inside = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", sys.executable]
    return subprocess.run([*inside, *map(str, arguments)], capture_output=True, text=True)

"""Where a report comes from: the command, the moment, the machine and its versions."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

import keyshift


def command_line(leave_out: str = "") -> str:
    """The command that runs, without one of its words."""
    program = Path(sys.argv[0]).name.replace("__main__.py", "keyshift")  # python -m keyshift.cli
    return shlex.join([program, *(word for word in sys.argv[1:] if word != leave_out)])


def moment() -> str:
    """ISO 8601 time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment() -> dict[str, str]:
    """What the numbers were measured with."""
    return {
        "keyshift": keyshift.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown processor")

"""The benchmarks run and their last line is complete; whether bars are met, only a full run can say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MECHANISMS = ("GQA", "GQA + shift", "GVA + shift", "MLA")


def quickly(script: str) -> dict[str, Any]:
    """What a benchmark prints last, at a tiny size; its exit code agrees with its checks."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    checks = result["checks"]
    assert all(set(check) == {"name", "value", "bar", "ok"} for check in checks)
    assert all(math.isfinite(check["value"]) for check in checks)
    assert done.returncode == (0 if all(check["ok"] for check in checks) else 1), done.stderr
    return result


def names(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["checks"]]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_generation_memory() -> None:
    result = quickly("generation_memory.py")
    allocated = [f"cache bytes allocated over predicted: {mechanism}" for mechanism in MECHANISMS]
    assert names(result) == [
        *allocated,
        "peak growth over predicted cache: GVA + shift",
        "time per append at 256 tokens over 64",
        "tokens copied per token appended",
    ]
    assert all(check["ok"] for check in result["checks"] if check["name"] in allocated)
    assert {(each["mechanism"], each["cache"]) for each in result["generations"]} == {
        (mechanism, cache) for mechanism in MECHANISMS for cache in ("keyshift", "dynamic")
    }


def test_shift() -> None:
    assert names(quickly("shift.py")) == [
        "shift cost of a training step",
        "shift over unfold convolution",
    ]


def test_trainer() -> None:
    assert names(quickly("trainer.py")) == ["engine throughput over a plain loop's"]

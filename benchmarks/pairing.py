"""What the benchmarks share: paired timing for noisy machines, and the line of checks that each prints last.

A round runs every contender once, in random order, so that whatever else the machine does strikes all of them
alike. Statistics are medians over rounds of a quantity formed inside a round (a ratio, a difference): never a
quotient of two separate runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Times = dict[str, list[float]]
"""Seconds per contender, one number per round."""


@dataclass(frozen=True)
class Check:
    """One number against its bar."""

    name: str
    value: float
    bar: float
    ok: bool


def at_most(name: str, value: float, bar: float) -> Check:
    return Check(name, value, bar, value <= bar)


def at_least(name: str, value: float, bar: float) -> Check:
    return Check(name, value, bar, value >= bar)


def exactly(name: str, value: float, bar: float) -> Check:
    return Check(name, value, bar, value == bar)


def arguments(documentation: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has; its docstring is the help."""
    parser = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="paired rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, data and order (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: does it run? The numbers mean nothing"
    )
    return parser


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def timed(
    contenders: dict[str, Callable[[], object]], *, rounds: int, seed: int, label: str, warmup: int = 3
) -> Times:
    """Seconds of every contender in every round, after ``warmup`` rounds that do not count.

    A contender that prepares something first returns the seconds that it wants counted.
    """
    order, draw = list(contenders), random.Random(seed)
    times: Times = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    try:
        for index in range(-warmup, rounds):
            draw.shuffle(order)
            for name in order:
                began = time.perf_counter()
                own = contenders[name]()
                seconds = time.perf_counter() - began
                if index >= 0:
                    times[name].append(own if isinstance(own, float) else seconds)
            if index >= 0 and (index + 1) % max(1, rounds // 10) == 0:
                say(f"{label}: round {index + 1} of {rounds}")
    finally:
        gc.enable()
    return times


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def difference(of: Sequence[float], minus: Sequence[float]) -> float:
    """The median of the rounds' differences."""
    return statistics.median(a - b for a, b in zip(of, minus, strict=True))


def interval(statistic: Callable[[Times], float], times: Times, *, resamples: int = 1000) -> list[float]:
    """A 95% interval of a statistic of whole rounds (percentile bootstrap)."""
    draw = random.Random(0)
    rounds = range(len(next(iter(times.values()))))
    drawn = []
    for _ in range(resamples):
        picked = draw.choices(rounds, k=len(rounds))
        drawn.append(statistic({name: [each[i] for i in picked] for name, each in times.items()}))
    cuts = statistics.quantiles(drawn, n=40)
    return [cuts[0], cuts[-1]]


def finish(checks: list[Check], **facts: Any) -> int:
    """Print the checks for people on stderr and for programs as stdout's last line; the exit code."""
    for check in checks:
        say(f"{'ok    ' if check.ok else 'MISSED'} {check.name}: {check.value:.4g} (bar {check.bar:.4g})")
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps({"checks": [asdict(check) for check in checks], **facts, **machine}), flush=True)
    return 0 if all(check.ok for check in checks) else 1

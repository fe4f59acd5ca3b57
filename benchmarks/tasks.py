"""How fast the tasks draw their batches: tokens per second on one core.

    python benchmarks/tasks.py [--rounds 20]

Every task draws training batches of 64 rows, at its default sizes and, where its paper has larger ones, at
those too. Nothing is drawn ahead, and no batch twice: the step is the round. A batch is timed until its
tensors exist. The value is the median over rounds; the tasks take turns in random order.

Batches are drawn by the process that trains, so what they take comes on top of every step. All tokens of a
row count, those without a label and padding too: they are what a model reads.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from pairing import arguments, at_least, finish, timed

from keyshift.tasks import TASKS, HopK, Induction, Recall, Task

ROWS = 64
LARGER: dict[str, Task] = {
    "hop_k, 100 tokens": HopK(vocab_size=22, sequence_length=100),
    "induction, 512 tokens": Induction(vocab_size=8000, sequence_length=512),
    "recall, 512 tokens": Recall(vocab_size=8192, sequence_length=512, key_value_pairs=64),
}
"""Sizes of the papers."""


def drawing(task: Task, seed: int, rows: int) -> Callable[[], None]:
    """A function that draws the next batch."""
    step = iter(range(sys.maxsize))

    def draw() -> None:
        task.batch(seed, next(step), rows)

    return draw


def main() -> int:
    options = arguments(__doc__, rounds=20).parse_args()
    torch.set_num_threads(options.threads)
    rows, rounds = (4, 2) if options.quick else (ROWS, options.rounds)
    tasks = {**{name: task() for name, task in TASKS.items()}, **LARGER}
    times = timed(
        {name: drawing(task, options.seed, rows) for name, task in tasks.items()},
        rounds=rounds,
        seed=options.seed,
        label="batches",
    )
    speeds = {
        name: rows * task.sequence_length / statistics.median(times[name]) for name, task in tasks.items()
    }
    return finish(
        [at_least(f"tokens/s: {name}", speed, 1e6) for name, speed in speeds.items()],
        rows=rows,
        rounds=rounds,
    )


if __name__ == "__main__":
    sys.exit(main())

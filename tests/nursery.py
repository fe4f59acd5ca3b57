"""Starts a training process for every line of input, by forking: fast enough to kill fifty of them."""

import os
import sys
from pathlib import Path

import torch
from test_training import SETTINGS, SOURCE, model

from keyshift.training import train


def child(out: Path, last: int | None) -> None:
    settings = SETTINGS.model_copy(update={"steps": 10_000, "save_steps": 1, "eval_steps": 10_000})
    steps = []

    def progress(standing) -> None:
        steps.append(standing.step)

    train(
        model(seed=len(steps)),
        SOURCE,
        settings,
        out,
        seed=0,
        resume=True,
        stop=lambda: last is not None and steps[-1] >= last,
        on_progress=progress,
    )


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for line in sys.stdin:
        last = int(line)
        if pid := os.fork():
            say(pid)
            _, status = os.waitpid(pid, 0)
            say(status)
        else:
            code = 1
            try:
                child(out, last or None)
                code = 0
            finally:
                os._exit(code)


if __name__ == "__main__":
    main()

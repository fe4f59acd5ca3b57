"""Checkpoints on two processes, against `generate`: python serve_in_two.py CHECKPOINT …"""

import sys
from pathlib import Path

from served import prompts
from test_serving import answers, assert_greedy, engine


def main() -> None:
    texts = prompts(1, 17, 100, 64)
    for path in sys.argv[1:]:
        with engine(Path(path), tensor_parallel_size=2, distributed_executor_backend="mp") as started:
            assert_greedy(Path(path), texts, answers(started, texts))


if __name__ == "__main__":
    main()

"""Checkpoints served in a process of their own, against `generate`: serve_apart.py OPTIONS CHECKPOINT …

OPTIONS are the engine's, as JSON. The last line is JSON as well: what the engine counted.
"""

import json
import sys
from pathlib import Path

from served import prompts
from test_serving import answers, assert_greedy, counted, engine


def main() -> None:
    options, *paths = sys.argv[1:]
    texts = prompts(40, 7, 90, 17, begin=(5, 6, 7) * 6)
    for path in paths:
        with engine(Path(path), **json.loads(options)) as started:
            assert_greedy(Path(path), texts, answers(started, texts))
            numbers = {
                what: counted(started, f"spec_decode_num_{what}_tokens") for what in ("draft", "accepted")
            }
    sys.stdout.write(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main()

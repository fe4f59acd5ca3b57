"""Passkey retrieval: a number hidden in filler text, to be known at its end (Mohtashami and Jaggi 2023)."""

from __future__ import annotations

from random import Random

from keyshift.errors import UserError
from keyshift.evaluation.builtin import Measure, Settings
from keyshift.evaluation.scoring import Tick, log_likelihoods
from keyshift.opened import Opened

INTRODUCTION = (
    "There is an important number hidden inside a lot of irrelevant text. Find it and memorize it. "
    "You will be asked about it at the end.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"

CANDIDATES = 10
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTEST = 256
KEYS = 4
"""Per length and depth, unless a limit says otherwise."""


def lengths(positions: int, name: str) -> list[int]:
    """Tokens per request: 256, 512, 1024, … and all positions that the model has.

    Raises:
        UserError: not even the shortest fits.
    """
    if positions < SHORTEST:
        raise UserError(
            f"--tasks passkey reads {SHORTEST} tokens and {name} has positions for "
            f"{positions}; leave passkey out"
        )
    found, length = [], SHORTEST
    while length < positions:
        found.append(length)
        length *= 2
    return [*found, positions]


def passkey(opened: Opened, settings: Settings, length: int, tick: Tick) -> list[Measure]:
    """How often the hidden five-digit number is the likeliest of ten, in requests of ``length`` tokens or, as
    the filler falls, a few less.

    The number stands at 0, 25, 50, 75 and 100% of the filler. It and nine others, all drawn alike, are
    ranked by log-likelihood after the question, so chance is 10%; nothing is generated. The same numbers
    are drawn for every model.

    Raises:
        UserError: a tokenizer with which not even a request without filler fits.
    """
    keys = settings.limit or KEYS
    total = keys * len(DEPTHS)
    right = dict.fromkeys(DEPTHS, 0)
    for index, depth in enumerate(DEPTHS):
        for trial in range(keys):
            numbers = Random(f"{length} {depth} {trial}").sample(range(10_000, 100_000), CANDIDATES)
            pairs = requests(opened, [str(number) for number in numbers], length, depth)
            scores = log_likelihoods(opened, pairs, settings.batch_size)
            right[depth] += scores[0] > max(scores[1:])
            tick(index * keys + trial + 1, total)
    return [
        Measure(f"acc @{length}", sum(right.values()) / total, total),
        *(Measure(f"acc @{length}, depth {d:.0%}", right[d] / keys, keys) for d in DEPTHS),
    ]


def requests(opened: Opened, keys: list[str], length: int, depth: float) -> list[tuple[list[int], list[int]]]:
    """Context and continuation for every candidate of ``keys``, of which the first is the hidden one; with
    as many pieces of filler as let the longest fit into ``length`` tokens."""

    def text(pieces: int) -> str:
        before = round(depth * pieces)
        filler = FILLER * before, FILLER * (pieces - before)
        return INTRODUCTION + filler[0] + NEEDLE.format(key=keys[0]) + filler[1] + QUESTION

    longest = max(keys, key=lambda key: len(opened.encode(f"{text(0)} {key}")))

    def size(pieces: int) -> int:
        return len(opened.encode(f"{text(pieces)} {longest}")) - 1  # the last token is not read

    if size(0) > length:
        raise UserError(
            f"--tasks passkey: a request of {opened.name} takes {size(0)} tokens without any filler, above "
            f"{length}; leave passkey out"
        )
    per_piece = max(1, (size(8) - size(0)) // 8)
    pieces = (length - size(0)) // per_piece + 1
    while size(pieces) > length:
        pieces -= 1
    context = opened.encode(text(pieces))
    wholes = [opened.encode(f"{text(pieces)} {key}") for key in keys]
    return [(context, whole[len(context) :]) for whole in wholes]

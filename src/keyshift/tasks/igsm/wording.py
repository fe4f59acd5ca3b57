"""Graphs as rows of tokens: sentences in random order, a question, the solution step by step.

Every sentence has a slot for each token that it could have; the slots in use are then moved together.
Letters of shapes: B problems, S solution parameters, M parameters, K operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyshift.tasks.igsm.graph import INSTANCE, MOST_INPUTS, PRODUCT, Graphs, Shape
from keyshift.tasks.igsm.vocabulary import (
    AND,
    AS,
    CATEGORY,
    COMMA,
    DEFINE,
    DIFFERENCE_OF,
    DOES,
    END,
    EQUALS,
    HAVE,
    HOW_MANY,
    IS,
    LAYERS,
    LETTER,
    LETTERS,
    MINUS,
    MORE_THAN,
    NAME,
    NAMES,
    NUMBER,
    PLUS,
    SEMICOLON,
    SO,
    STAR,
    STOP,
    SUM_OF,
    TIMES,
)

QUESTION_LENGTH = 5


@dataclass
class Slots:
    """Tokens [B, n] and which of them are in use, bool."""

    tokens: np.ndarray
    used: np.ndarray


def write(rng: np.random.Generator, graphs: Graphs, shape: Shape, names: int) -> tuple[Slots, Slots]:
    """The problems with their questions, and the solutions with their end."""
    named = _name(rng, graphs, shape, names)
    return _write_problem(rng, graphs, named), _write_solution(rng, graphs, named)


def _name(rng: np.random.Generator, graphs: Graphs, shape: Shape, names: int) -> np.ndarray:
    """[B, M, 2]: the tokens of each parameter's owner and of what is counted."""
    rows = len(graphs.value)
    words = np.argsort(rng.random((rows, LAYERS, names), np.float32), axis=2)[:, :, : shape.items]
    words = (NAME + np.arange(LAYERS)[:, None] * NAMES + words).reshape(rows, -1)
    below = graphs.owner // shape.items + 1
    category = CATEGORY + below + (graphs.kind == PRODUCT)
    row = np.arange(rows)[:, None]
    item = words[row, np.where(graphs.kind == INSTANCE, below * shape.items + graphs.item, 0)]
    return np.stack((words[row, graphs.owner], np.where(graphs.kind == INSTANCE, item, category)), axis=2)


def _write_problem(rng: np.random.Generator, graphs: Graphs, named: np.ndarray) -> Slots:
    rows, nodes = graphs.kind.shape
    row = np.arange(rows)[:, None]
    count, constant = graphs.inputs_count, graphs.constant
    tokens = np.zeros((rows, nodes, 6 + 3 * MOST_INPUTS), np.int16)
    used = np.zeros(tokens.shape, bool)
    tokens[:, :, :2] = named
    tokens[:, :, 2] = EQUALS
    used[:, :, :3] = True
    tokens[:, :, 3] = NUMBER + constant
    used[:, :, 3] = constant >= 0
    tokens[:, :, 4] = np.where(graphs.scaled, TIMES, MORE_THAN)
    used[:, :, 4] = (constant >= 0) & (count > 0)
    tokens[:, :, 5] = np.where(graphs.difference, DIFFERENCE_OF, SUM_OF)
    used[:, :, 5] = count > 1
    for place in range(MOST_INPUTS):
        slot = 6 + 3 * place
        tokens[:, :, slot : slot + 2] = named[row, graphs.inputs[:, :, place]]
        used[:, :, slot : slot + 2] = (place < count)[:, :, None]
        tokens[:, :, slot + 2] = np.where(place + 2 == count, AND, COMMA)
        used[:, :, slot + 2] = place + 1 < count
    tokens[:, :, -1], used[:, :, -1] = STOP, True  # behind a fourth input nothing else can come
    used &= (graphs.present & (graphs.kind == INSTANCE))[:, :, None]
    order = np.argsort(rng.random((rows, nodes), np.float32), axis=1)
    sentences = Slots(tokens[row, order].reshape(rows, -1), used[row, order].reshape(rows, -1))

    owner, item = named[np.arange(rows), (graphs.operations > 0).sum(1) - 1].T
    question = np.zeros((rows, QUESTION_LENGTH), np.int16)
    question[:, 0], question[:, 2], question[:, 4] = HOW_MANY, DOES, HAVE
    question[:, 1], question[:, 3] = item, owner
    return join(sentences, Slots(question, np.ones_like(question, bool)))


def _write_solution(rng: np.random.Generator, graphs: Graphs, named: np.ndarray) -> Slots:
    rows, steps = graphs.value.shape  # as many operations at most as parameters
    row = np.arange(rows)[:, None]
    until = graphs.operations.cumsum(1)
    letters = LETTER + np.argsort(rng.random((rows, LETTERS), np.float32), axis=1)[:, :steps]
    letter = letters[row, until - 1]
    step = np.arange(steps)
    there = step < until[:, -1:]
    node = np.minimum((step[:, None] >= until[:, None, :]).sum(2), steps - 1)
    stage = np.where(there, step - (until - graphs.operations)[row, node], 0)
    last = step == until[row, node] - 1
    count, constant = graphs.inputs_count[row, node], graphs.constant[row, node]
    binary = count + (constant >= 0) > 1
    with_constant = binary & (stage == count - 1)

    def at(place: np.ndarray) -> np.ndarray:
        return graphs.inputs[row, node, np.minimum(place, MOST_INPUTS - 1)]

    so_far = np.where(stage == 0, letter[row, np.minimum(at(stage), steps - 1)], np.roll(letters, 1, axis=1))
    following = np.minimum(at(stage + 1), steps - 1)
    partial = graphs.partial[row, node, stage]
    number = np.maximum(constant, 0)
    sign = np.where(graphs.kind[row, node] == PRODUCT, STAR, PLUS)
    sign = np.where(graphs.difference[row, node], MINUS, sign)
    sign = np.where(with_constant, np.where(graphs.scaled[row, node], STAR, PLUS), sign)
    result = np.where(
        last, graphs.value[row, node], graphs.partial[row, node, np.minimum(stage + 1, MOST_INPUTS - 1)]
    )
    columns = [
        (DEFINE, stage == 0),
        (named[row, node, 0], stage == 0),
        (named[row, node, 1], stage == 0),
        (AS, stage == 0),
        (letter[row, node], stage == 0),
        (SEMICOLON, there),
        (SO, last),
        (letters, there),
        (IS, count > 0),
        (np.where(with_constant, NUMBER + number, so_far), count > 0),
        (sign, binary),
        (np.where(with_constant, so_far, letter[row, following]), binary),
        (IS, binary),
        (NUMBER + np.where(with_constant, number, partial), binary),
        (sign, binary),
        (NUMBER + np.where(with_constant, partial, graphs.value[row, following]), binary),
        (IS, there),
        (NUMBER + result, there),
        (STOP, last),
    ]
    tokens = np.zeros((rows, steps, len(columns)), np.int16)
    used = np.zeros(tokens.shape, bool)
    for slot, (token, where) in enumerate(columns):
        tokens[:, :, slot], used[:, :, slot] = token, where
    used &= there[:, :, None]
    end = Slots(np.full((rows, 1), END, np.int16), np.ones((rows, 1), bool))
    return join(Slots(tokens.reshape(rows, -1), used.reshape(rows, -1)), end)


def join(first: Slots, second: Slots) -> Slots:
    """One after the other."""
    return Slots(np.hstack((first.tokens, second.tokens)), np.hstack((first.used, second.used)))


def pack(slots: Slots, length: int, padding: int) -> np.ndarray:
    """[B, length], int64: the used tokens from the left, then padding."""
    packed = np.full((len(slots.tokens), length), padding, np.int64)
    packed[np.arange(length) < slots.used.sum(1)[:, None]] = slots.tokens[slots.used]
    return packed

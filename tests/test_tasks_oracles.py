"""Tasks against their definitions, in plain loops over what a model has seen, and against cheap tricks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keyshift.errors import UserError
from keyshift.tasks import TASKS, HopK, NGram, Recall, Task

UNASKED = -100


def successor(seen: list[int]) -> int:
    """What followed the present token when it was last seen."""
    for position in reversed(range(len(seen) - 1)):
        if seen[position] == seen[-1]:
            return seen[position + 1]
    return UNASKED


def hop_answer(task: HopK, seen: list[int]) -> int:
    if len(seen) == 1:
        return UNASKED
    hops, letters = seen[0] - task.letters - 1, [None, *seen[1:]]  # letters count from 1, as in the paper
    place = len(letters) - 1
    for _ in range(hops):
        places = [j for j in range(2, place + 1) if letters[j - 1] == letters[place]]
        if not places:
            return task.letters
        place = max(places)
    return seen[place]


def trigram_answer(task: NGram, seen: list[int]) -> int:
    if len(seen) % 3 != 2:
        return UNASKED
    (third,) = [int(x3) for x1, x2, x3 in task.table if [x1, x2] == seen[-2:]]
    return third


def recalled_value(task: Recall, seen: list[int]) -> int:
    context = 2 * task.key_value_pairs
    if len(seen) <= context or not 1 <= seen[-1] < task.vocab_size // 2:
        return UNASKED
    (value,) = [seen[i + 1] for i in range(0, context, 2) if seen[i] == seen[-1]]
    return value


ORACLES: dict[str, Callable[[Any, list[int]], int]] = {
    "hop_k": hop_answer,
    "induction": lambda task, seen: successor(seen),
    "ngram": trigram_answer,
    "recall": recalled_value,
    "repeated": lambda task, seen: successor(seen),
}
"""The answer after the tokens seen so far, or that none is asked for. Nothing after them is shown."""

SIZES: dict[str, st.SearchStrategy[dict[str, int]]] = {
    "hop_k": st.fixed_dictionaries(
        {
            "letters": st.integers(3, 6),
            "vocab_size": st.integers(13, 20),
            "sequence_length": st.integers(4, 40),
            "hops": st.integers(0, 5),
            "least_hops": st.integers(0, 3),
        }
    ),
    "induction": st.fixed_dictionaries(
        {"vocab_size": st.integers(2, 60), "sequence_length": st.integers(3, 40)}
    ),
    "ngram": st.fixed_dictionaries(
        {
            "pairs": st.integers(4, 60),
            "vocab_size": st.integers(2, 40),
            "sequence_length": st.integers(3, 30),
            "table_seed": st.integers(0, 50),
        }
    ),
    "recall": st.fixed_dictionaries(
        {
            "vocab_size": st.integers(6, 40),
            "sequence_length": st.integers(8, 50),
            "key_value_pairs": st.integers(2, 10),
            "power_percent": st.integers(0, 100),
        }
    ),
    "repeated": st.fixed_dictionaries(
        {
            "vocab_size": st.integers(3, 40),
            "sequence_length": st.integers(5, 40),
            "shortest": st.integers(1, 3),
            "longest": st.none() | st.integers(3, 20),
        }
    ),
}
"""Sizes, about half of which make sense together."""


def build(name: str, sizes: dict[str, int]) -> Task | None:
    try:
        return TASKS[name](**sizes)
    except UserError:
        return None


def test_every_task_has_an_oracle():
    assert set(ORACLES) | {"igsm"} == set(TASKS)  # iGSM's is in test_tasks_igsm.py
    assert set(SIZES) == set(ORACLES)


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), split=st.sampled_from(("train", "validation")))
def test_a_label_is_what_the_definition_says_of_the_tokens_before_it(name, data, seed, split):
    """So no label depends on a token that comes after the question."""
    task = build(name, data.draw(SIZES[name]))
    assume(task is not None)
    batch = task.batch(seed, 3, 4, split)
    inputs, labels = batch["input_ids"], batch["labels"]
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs.shape == labels.shape == (4, task.sequence_length)
    assert inputs.min() >= 0
    assert max(inputs.max(), labels.max()) < task.vocab_size
    for row, asked in zip(inputs.tolist(), labels.tolist(), strict=True):
        answers = [ORACLES[name](task, row[: place + 1]) for place in range(len(row) - 1)]
        assert asked == [UNASKED, *answers]
        if name != "hop_k":  # elsewhere a label is the token itself
            assert all(label in (token, UNASKED) for token, label in zip(row, asked, strict=True))


@pytest.mark.parametrize("name", ORACLES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_guess_is_neither_hopeless_nor_better_than_certain(name, data):
    task = build(name, data.draw(SIZES[name]))
    assume(task is not None)
    assert 0 < task.chance_level() <= 1


TRICKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the present token": lambda inputs, labels: inputs[:, :-1],
    "the token before": lambda inputs, labels: inputs.roll(1, 1)[:, :-1],
    "the most frequent answer": lambda inputs, labels: labels[labels != UNASKED].mode().values,
    "the first token": lambda inputs, labels: inputs[:, :1],
    "the second token": lambda inputs, labels: inputs[:, 1:2],
    "the token before that": lambda inputs, labels: inputs.roll(2, 1)[:, :-1],
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("name", TASKS)
def test_no_trick_is_better_than_the_stated_guess(name, trick):
    task: Task = TASKS[name]()
    batch = task.batch(0, 0, 512)
    inputs, labels = batch["input_ids"], batch["labels"][:, 1:]
    asked = labels != UNASKED
    right = (TRICKS[trick](inputs, labels) == labels) & asked
    assert right.sum() / asked.sum() < task.chance_level() + 0.02

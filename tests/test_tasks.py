"""The induction task against a brute-force oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshift.errors import UserError
from keyshift.tasks import Induction

sizes = {"vocab_size": st.integers(2, 60), "sequence_length": st.integers(8, 40)}


def build(vocab_size: int, sequence_length: int) -> Induction | None:
    try:
        return Induction(vocab_size, sequence_length)
    except UserError:
        return None


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), step=st.integers(0, 1000), **sizes)
def test_every_repeat_is_followed_by_what_followed_before(seed, step, vocab_size, sequence_length):
    if (task := build(vocab_size, sequence_length)) is None:
        return
    batch = task.batch(seed, step, 5)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        successor: dict[int, int] = {}
        for position, token in enumerate(tokens[:-1]):
            following = tokens[position + 1]
            determined = token in successor
            if determined:
                assert following == successor[token]
            successor[token] = following
            assert labels[position + 1] == (following if determined else -100)
        assert labels[0] == -100


def test_the_draws_before_the_first_repeat_are_uniform():
    tokens = Induction(8, 16).batch(0, 0, 20_000)["input_ids"][:, :2].numpy()
    counts = np.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64)
    assert abs(counts - 20_000 / 64).max() < 5 * (20_000 / 64) ** 0.5


def test_a_batch_is_a_pure_function_of_seed_and_step():
    task = Induction()
    for split in ("train", "validation"):
        first, again = task.batch(3, 7, 4, split), task.batch(3, 7, 4, split)
        assert all(torch.equal(first[name], again[name]) for name in first)
    batches = [
        task.batch(3, 7, 4),
        task.batch(3, 8, 4),
        task.batch(4, 7, 4),
        task.batch(3, 7, 4, "validation"),
    ]
    inputs = [batch["input_ids"] for batch in batches]
    assert all(not torch.equal(a, b) for i, a in enumerate(inputs) for b in inputs[:i])


def test_the_stated_probability_of_a_repeat_and_the_chance_level_hold():
    task = Induction(vocab_size=50, sequence_length=12)
    batch = task.batch(1, 0, 20_000)
    labels = batch["labels"]
    assert (labels != -100).any(1).float().mean().item() == pytest.approx(task.repeat_probability, abs=0.02)
    hits = total = 0.0
    for tokens in batch["input_ids"][:4000].tolist():
        seen: dict[int, int] = {}
        for position, token in enumerate(tokens):
            if token in seen:
                answers = len(tokens) - 1 - position
                hits += answers / (position - seen[token])
                total += answers
                break
            seen[token] = position
    assert hits / total == pytest.approx(task.chance_level(), abs=0.02)


@pytest.mark.parametrize("sizes", [(1, 8), (8, 2), (8000, 16)])
def test_sizes_without_answers_are_refused(sizes):
    with pytest.raises(UserError, match="vocab_size"):
        Induction(*sizes)


def test_every_batch_has_an_answer_to_learn_from():
    task = Induction(4096, 64)
    for step in range(300):
        assert (task.batch(0, step, 4)["labels"] != -100).any()

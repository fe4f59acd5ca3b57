"""The tasks against brute-force oracles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshift.errors import UserError
from keyshift.tasks import TASKS, Induction, RepeatedTokens

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


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_pure_function_of_seed_and_step(name):
    task = TASKS[name]()
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


repeated = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(2, 40),
        "sequence_length": st.integers(4, 40),
        "shortest": st.integers(1, 20),
        "longest": st.none() | st.integers(1, 20),
    }
)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1000), step=st.integers(0, 1000), sizes=repeated)
def test_a_string_without_repeats_is_repeated_to_the_end(seed, step, sizes):
    fits = min(sizes["vocab_size"] - 1, sizes["sequence_length"] - 3)
    longest = sizes["longest"] or min(fits, (sizes["sequence_length"] - 1) // 2)
    if not sizes["shortest"] <= longest <= fits:
        with pytest.raises(UserError, match=r"task (shortest|longest)="):
            RepeatedTokens(**sizes)
        return
    batch = RepeatedTokens(**sizes).batch(seed, step, 5)
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert len(tokens) == sizes["sequence_length"]
        assert tokens[0] == 0
        period = len(set(tokens[1:]))  # every token of the string once before the first comes again
        assert sizes["shortest"] <= period <= longest
        assert all(1 <= token < sizes["vocab_size"] for token in tokens[1:])
        assert all(tokens[i] == tokens[i - period] for i in range(period + 1, len(tokens)))
        seen: set[int] = set()
        for position, token in enumerate(tokens):
            determined = position > 0 and tokens[position - 1] in seen
            assert labels[position] == (token if determined else -100)
            seen.update(tokens[position - 1 : position])
        assert any(label != -100 for label in labels)


def test_the_periods_and_the_tokens_of_repeated_strings_are_uniform():
    rows = RepeatedTokens(vocab_size=9, sequence_length=12, shortest=2, longest=5).batch(0, 0, 20_000)
    tokens = rows["input_ids"]
    periods = np.bincount([len(set(row)) - 1 for row in tokens.tolist()], minlength=6)
    assert abs(periods[2:] - 5000).max() < 5 * 5000**0.5
    pairs = np.bincount(tokens[:, 1].numpy() * 9 + tokens[:, 2].numpy(), minlength=81).reshape(9, 9)
    expected = 20_000 / (8 * 7) * (1 - np.eye(8))
    assert abs(pairs[1:, 1:] - expected).max() < 5 * expected.max() ** 0.5


def test_guessing_within_the_repeated_string_is_as_good_as_stated():
    task = RepeatedTokens(vocab_size=50, sequence_length=24, shortest=3)
    batch = task.batch(1, 0, 20_000)
    hits = total = 0.0
    for tokens, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        answers = sum(label != -100 for label in labels)
        hits += answers / len(set(tokens[1:]))
        total += answers
    assert hits / total == pytest.approx(task.chance_level(), abs=0.005)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"shortest": 0}, "shortest=0"),
        ({"shortest": 40}, "shortest=40 is above longest=31"),
        ({"shortest": 9, "longest": 8}, "shortest=9 is above longest=8"),
        ({"longest": 62}, r"longest=62.*sequence_length=64 .*at most 61"),
        ({"vocab_size": 8, "longest": 8}, r"longest=8: vocab_size=8 .*at most 7"),
        ({"vocab_size": 1}, "longest=0"),
        ({"sequence_length": 3}, r"shortest|longest"),
    ],
)
def test_periods_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        RepeatedTokens(**sizes)

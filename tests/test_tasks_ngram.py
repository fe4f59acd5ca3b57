"""Trigrams by heart: the table needs both tokens, is one and the same everywhere, and is used evenly."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshift.errors import UserError
from keyshift.tasks import NGram


@settings(max_examples=60, deadline=None)
@given(pairs=st.integers(4, 300), vocab_size=st.integers(18, 5000), table_seed=st.integers(0, 100))
def test_pairs_are_distinct_and_neither_token_alone_tells_the_third(pairs, vocab_size, table_seed):
    task = NGram(pairs, vocab_size, table_seed=table_seed)
    table = [tuple(row) for row in task.table.tolist()]
    assert len({(x1, x2) for x1, x2, _ in table}) == len(table) == pairs
    assert all(0 <= token < vocab_size for row in table for token in row)
    right = []
    for given_token in (0, 1):
        following = defaultdict(Counter)
        for row in table:
            following[row[given_token]][row[2]] += 1
        assert any(len(thirds) > 1 for thirds in following.values())
        right.append(sum(max(thirds.values()) for thirds in following.values()) / pairs)
    assert task.chance_level() == pytest.approx(max(right))
    assert task.chance_level() < 1


def test_most_tokens_are_shared_by_many_pairs_even_of_a_large_vocabulary():
    table = NGram(200, 50_000).table
    for column in (0, 1):
        counts = np.unique(table[:, column], return_counts=True)[1]
        assert len(counts) == 20
        assert counts.mean() == 10
        assert counts.min() > 1
    assert NGram(200, 50_000).chance_level() < 0.15


def test_training_and_validation_share_the_table_and_another_seed_has_another():
    task = NGram(pairs=50, vocab_size=30, sequence_length=600)
    table = {tuple(row) for row in task.table.tolist()}
    for seed, split in ((0, "train"), (1, "train"), (0, "validation")):
        rows = task.batch(seed, 0, 20, split)["input_ids"].reshape(-1, 3)
        assert {tuple(row) for row in rows.tolist()} == table
    assert not np.array_equal(NGram().table, NGram(table_seed=1).table)
    assert np.array_equal(NGram(sequence_length=9).table, NGram(sequence_length=90).table)


def test_all_pairs_are_equally_likely():
    task = NGram(pairs=20, vocab_size=30, sequence_length=30)
    rows = task.batch(0, 0, 4000)["input_ids"].reshape(-1, 3)
    counts = np.array(list(Counter(tuple(row) for row in rows.tolist()).values()))
    assert len(counts) == 20
    assert abs(counts - 2000).max() < 5 * 2000**0.5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pairs": 3}, "pairs=3: a table has at least 4"),
        ({"pairs": 10, "vocab_size": 3}, "pairs=10: vocab_size=3 has 9 pairs"),
        ({"sequence_length": 2}, "sequence_length=2"),
        ({"table_seed": -1}, "table_seed=-1"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        NGram(**sizes)

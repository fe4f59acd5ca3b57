"""Recall: the layout, and how pairs, slots and their match are drawn."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keyshift.errors import UserError
from keyshift.tasks import Recall


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.integers(2, 8),
    vocab_size=st.integers(6, 40),
    length=st.integers(8, 50),
    power=st.integers(0, 100),
)
def test_every_key_is_given_once_and_asked_for_once(pairs, vocab_size, length, power):
    assume(length >= 4 * pairs and vocab_size // 2 > pairs)
    batch = Recall(vocab_size, length, pairs, power).batch(0, 0, 5)
    for row, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        given_pairs = dict(zip(row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(given_pairs) == len(set(given_pairs.values())) == pairs
        assert all(1 <= key < vocab_size // 2 <= value < vocab_size for key, value in given_pairs.items())
        later = row[2 * pairs :]
        slots = [(later[i], later[i + 1]) for i in range(0, len(later) - 1, 2)]
        assert dict(slot for slot in slots if slot != (0, 0)) == given_pairs
        assert len([slot for slot in slots if slot != (0, 0)]) == pairs
        assert sum(label != -100 for label in labels) == pairs
        assert later[2 * (len(later) // 2) :] in ([], [0])


def test_keys_and_values_are_uniform_and_independent():
    tokens = (
        Recall(vocab_size=12, sequence_length=8, key_value_pairs=2).batch(0, 0, 40_000)["input_ids"].numpy()
    )
    keys = np.bincount(tokens[:, 0] * 6 + tokens[:, 2], minlength=36).reshape(6, 6)
    expected = 40_000 / 20 * (1 - np.eye(5))
    assert abs(keys[1:, 1:] - expected).max() < 5 * expected.max() ** 0.5
    assert keys[0].sum() == keys[:, 0].sum() == 0
    pairs = np.bincount(tokens[:, 0] * 6 + tokens[:, 1] - 6, minlength=36).reshape(6, 6)[1:]
    assert abs(pairs - 40_000 / 30).max() < 5 * (40_000 / 30) ** 0.5


@pytest.mark.parametrize("power", [0, 1, 50, 100])
def test_slots_are_drawn_one_after_the_other_by_the_power_law(power):
    """Against the probability of every set of two slots of five, by the definition."""
    task = Recall(vocab_size=12, sequence_length=14, key_value_pairs=2, power_percent=power)
    slots = task._draw_slots(np.random.default_rng(0), 40_000)
    weight = np.arange(1, 6) ** (power / 100 - 1)
    weight /= weight.sum()
    for i in range(5):
        for j in range(i):
            both = weight[i] * weight[j] * (1 / (1 - weight[i]) + 1 / (1 - weight[j]))
            for first, second in ((i, j), (j, i)):  # the first pair is asked for first half of the time
                seen = ((slots[:, 0] == first) & (slots[:, 1] == second)).mean()
                assert seen == pytest.approx(both / 2, abs=5 * (both / 2 / 40_000) ** 0.5)


def test_the_stated_guess_is_as_good_as_stated():
    task = Recall()
    batch = task.batch(0, 0, 2000)
    draw = np.random.default_rng(0)
    hits = 0
    for row, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        left = row[1:16:2]
        for label in labels:
            if label != -100:
                hits += draw.choice(left) == label
                left.remove(label)
    assert hits / 16_000 == pytest.approx(task.chance_level(), abs=0.02)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"key_value_pairs": 1}, "key_value_pairs=1"),
        ({"sequence_length": 31}, r"sequence_length=31: key_value_pairs=8 .* take 32 tokens"),
        ({"vocab_size": 17}, r"vocab_size=17 has 7 keys.* raise it to 18"),
        ({"power_percent": -1}, "power_percent=-1 must be from 0 to 100"),
        ({"power_percent": 101}, "power_percent=101"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        Recall(**sizes)

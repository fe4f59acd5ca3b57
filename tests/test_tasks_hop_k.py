"""k hops: the example, how rows are drawn, what is asked of a trained model."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.errors import UserError
from keyshift.tasks import Examined, HopK
from keyshift.tasks.hop_k import _find
from keyshift.tasks.induction import previous_occurrence
from keyshift.tasks.scoring import score

SMALL = HopK(letters=4, vocab_size=12, sequence_length=24, hops=5, least_hops=1)


class Answering:
    """A model that answers by a rule."""

    def __init__(self, rule: Any, vocab_size: int):
        self.rule, self.vocab_size = rule, vocab_size
        self.device, self.training = torch.device("cpu"), True
        self.rows: list[torch.Tensor] = []

    def eval(self) -> None:
        self.training = False

    def train(self, mode: bool) -> None:
        self.training = mode

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        assert not self.training
        assert not torch.is_grad_enabled()
        self.rows.append(input_ids)
        return SimpleNamespace(logits=one_hot(self.rule(input_ids), self.vocab_size).float())


def solve(input_ids: torch.Tensor) -> torch.Tensor:
    tokens = input_ids.numpy()
    found = _find(tokens, tokens[:, 0] - SMALL.letters - 1)
    return torch.from_numpy(np.where(found > 0, np.take_along_axis(tokens, found, 1), SMALL.letters))


def test_the_example_of_the_docstring():
    tokens = np.array([[6, 0, 1, 2, 0, 1, 2, 0]])
    assert previous_occurrence(tokens).tolist() == [[-1, -1, -1, -1, 1, 2, 3, 4]]
    assert _find(tokens, np.array([1])).tolist() == [[0, 0, 0, 0, 2, 3, 4, 5]]
    assert _find(tokens, np.array([2])).tolist() == [[0, 0, 0, 0, 0, 0, 2, 3]]
    assert _find(tokens, np.array([0])).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_letters_are_uniform_but_never_follow_themselves_and_k_is_uniform():
    tokens = SMALL.batch(0, 0, 20_000)["input_ids"].numpy()
    said = np.bincount(tokens[:, 0], minlength=12)
    assert np.flatnonzero(said).tolist() == [6, 7, 8, 9, 10]
    assert abs(said[6:11] - 4000).max() < 5 * 4000**0.5
    assert (tokens[:, 1:] < 4).all()
    for place in (1, 12):
        pairs = np.bincount(tokens[:, place] * 4 + tokens[:, place + 1], minlength=16).reshape(4, 4)
        expected = 20_000 / 12 * (1 - np.eye(4))
        assert abs(pairs - expected).max() < 5 * expected.max() ** 0.5


def test_a_hop_leads_one_letter_less_than_the_alphabet_back_on_average():
    tokens, _ = HopK(sequence_length=200)._draw(np.random.default_rng(0), np.full(1000, 1))
    assert (199 - _find(tokens, np.full(1000, 8))[:, -1]).mean() == pytest.approx(8 * 3, rel=0.03)


def test_the_stated_guess_is_as_good_as_stated():
    batch = SMALL.batch(1, 0, 20_000)
    inputs, labels = batch["input_ids"], batch["labels"]
    hits = 0
    for place in range(1, SMALL.sequence_length - 1):
        seen = Counter(
            zip(
                *(column.tolist() for column in (*inputs[:, [0, place]].T, labels[:, place + 1])), strict=True
            )
        )
        best: dict[tuple[int, int], int] = {}
        for (hops, letter, _), count in seen.items():
            best[hops, letter] = max(count, best.get((hops, letter), 0))
        hits += sum(best.values())
    assert hits / (20_000 * 22) == pytest.approx(SMALL.chance_level(), abs=0.01)


def test_examining_asks_for_the_letters_that_each_number_of_hops_leads_to():
    assert isinstance(SMALL, Examined)
    names = ["k=1", "k=2", "k=3", "k=4", "k=5"]
    right = Answering(solve, SMALL.vocab_size)
    assert SMALL.examine(right) == dict.fromkeys(names, 1.0)
    assert right.training
    assert [rows[:, 0].unique().tolist() for rows in right.rows] == [[6], [7], [8], [9], [10]]
    held_out = torch.cat(right.rows)
    assert len(held_out[:, 1:].unique(dim=0)) == len(held_out) == 500
    blank = Answering(lambda ids: torch.full_like(ids, SMALL.letters), SMALL.vocab_size)
    assert SMALL.examine(blank) == dict.fromkeys(names, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(right.rows, blank.rows, strict=True))
    copying = SMALL.examine(Answering(lambda ids: ids, SMALL.vocab_size))
    assert copying["k=1"] == 0  # what followed a letter is another letter
    assert copying["k=2"] == pytest.approx(0.5, abs=0.06)  # two letters often take turns
    assert max(copying.values()) < 0.6


def test_no_hop_is_a_copy_of_the_present_token():
    task = HopK(letters=4, vocab_size=6, sequence_length=10, hops=0)
    batch = task.batch(0, 0, 4)
    assert torch.equal(batch["labels"][:, 2:], batch["input_ids"][:, 1:-1])


def test_a_real_model_is_examined_and_left_in_the_mode_that_it_was_in():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = KeyshiftForCausalLM(KeyshiftConfig(vocab_size=12, attention="gqa", position="rope", **sizes))
    for mode in (True, False):
        scores = SMALL.examine(model.train(mode))
        assert model.training is mode
    assert list(scores) == ["k=1", "k=2", "k=3", "k=4", "k=5"]
    assert all(0 <= value <= 1 for value in scores.values())


def test_the_score_of_a_model_is_its_own_loss_and_counts_its_first_guesses():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = KeyshiftForCausalLM(KeyshiftConfig(vocab_size=12, attention="gqa", position="rope", **sizes))
    batches = [SMALL.batch(0, step, 8) for step in range(2)]
    loss, correct, count = score(model, batches)
    assert count == 2 * 8 * 22
    losses = [model(**batch).loss.item() for batch in batches]
    assert loss / count == pytest.approx(sum(losses) / 2, rel=1e-5)
    guesses = [model(batch["input_ids"]).logits[:, 1:-1].argmax(-1) for batch in batches]
    right = [guess == batch["labels"][:, 2:] for guess, batch in zip(guesses, batches, strict=True)]
    assert correct == torch.cat(right).sum()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"letters": 2}, "letters=2"),
        ({"hops": -1}, "least_hops=0 must be from 0 to hops=-1"),
        ({"least_hops": 17}, "least_hops=17 must be from 0 to hops=16"),
        ({"vocab_size": 21}, r"vocab_size=21.* need 22 tokens"),
        ({"sequence_length": 51}, r"sequence_length=51.*lead 48 tokens back.* at least 52"),
        ({"letters": 26, "sequence_length": 100}, r"hops=16 over letters=26 .* at least 404"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes, message):
    with pytest.raises(UserError, match=message):
        HopK(**sizes)

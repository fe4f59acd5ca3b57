"""Rows by number: every window once per epoch in whatever size, and mixtures that keep their shares."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import fails, sentences, write_jsonl

from keyshift import data
from keyshift.data import order
from keyshift.data.mixture import MixedStream


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_keyed_order_is_a_permutation(windows: int, seed: int, epoch: int) -> None:
    places = order._keyed(np.arange(windows), windows, seed, epoch)
    assert sorted(places.tolist()) == list(range(windows))


@given(st.integers(1, 300), st.integers(0, 9), st.lists(st.integers(0, 10**6), max_size=20), st.booleans())
def test_rows_are_a_pure_function_of_their_numbers(
    windows: int, seed: int, numbers: list[int], keyed: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_TABLE_WINDOWS", 0 if keyed else 2**20)
        chosen = order.shuffled(np.array(numbers, np.int64), windows, seed)
        alone = [int(order.shuffled(np.array([number]), windows, seed)[0]) for number in numbers]
        assert chosen.tolist() == alone
        epoch = order.shuffled(np.arange(windows) + 7 * windows, windows, seed)
        assert sorted(epoch.tolist()) == list(range(windows))


def test_the_keyed_order_looks_random() -> None:
    windows = 1_000_003
    first, second = (order._keyed(np.arange(windows), windows, 0, epoch) for epoch in (0, 1))
    other = order._keyed(np.arange(windows), windows, 1, 0)
    for a, b in ((first, second), (first, other), (first, np.arange(windows)), (first[:-1], first[1:])):
        assert (a == b).sum() < 10
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.005  # five standard errors
    counts = np.bincount(first[:10_000] * 100 // windows, minlength=100)
    assert ((counts - 100) ** 2 / 100).sum() < 170  # chi squared of 99 degrees of freedom, p about 1e-5
    assert abs((np.diff(first) > 0).mean() - 0.5) < 0.005


def test_billions_of_windows_cost_no_memory_and_no_time() -> None:
    numbers = np.arange(64) + 123_456_789_012
    tracemalloc.start()
    began = time.process_time()
    chosen = order.shuffled(numbers, 5_000_000_000, seed=1)
    assert time.process_time() - began < 1
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert len(set(chosen.tolist())) == 64
    assert 0 <= chosen.min() < chosen.max() < 5_000_000_000


# Mixtures


def stream_of(count: int, tag: int) -> data.TokenStream:
    """Windows of two tokens: the stream's tag and the window's number."""
    tokens = np.stack([np.full(count, tag), np.arange(count)], axis=1).astype(np.uint16).ravel()
    return data.TokenStream([data.MemoryShard(tokens, np.array([0]), 2 * count)])


def test_every_row_is_its_sources_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, or at once: source s gives its own rows 0, 1, 2, … in that order, over several cycles."""
    monkeypatch.setattr(data.mixture, "_BLOCK", 8)
    monkeypatch.setattr(data.mixture, "_CYCLE", 4)
    data.mixture._block.cache_clear()
    data.mixture._before.cache_clear()
    streams = [stream_of(count, tag) for tag, count in enumerate((7, 300, 40))]
    mixed = MixedStream(streams, (0.15, 0.6, 0.25))
    rows = mixed.rows(np.arange(300), 2, seed=5)["input_ids"]
    sources = mixed.sources(np.arange(300), seed=5)
    assert rows[:, 0].tolist() == sources.tolist()
    for tag, stream in enumerate(streams):
        own = rows[rows[:, 0] == tag]
        assert torch.equal(own, stream.rows(np.arange(len(own)), 2, seed=5)["input_ids"])
    shuffled = np.random.default_rng(0).permutation(300)
    assert torch.equal(mixed.rows(shuffled, 2, seed=5)["input_ids"], rows[shuffled])
    assert torch.equal(mixed.batch(3, 20, 2, seed=5)["input_ids"], rows[60:80])
    assert not torch.equal(mixed.rows(np.arange(300), 2, seed=6)["input_ids"], rows)
    data.mixture._block.cache_clear()
    data.mixture._before.cache_clear()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=6), st.integers(0, 10**9))
def test_shares_are_the_weights(weights: list[float], first: int) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    mixed = MixedStream([stream_of(2, 0)] * len(shares), shares)
    first -= first % 4096
    counts = np.bincount(mixed.sources(np.arange(first, first + 4096), seed=0), minlength=len(shares))
    assert np.abs(counts - np.array(shares) * 4096).max() < 1
    cycle = data.mixture._before(shares)
    assert np.abs(cycle[-1] - np.array(shares) * 4096 * 256).max() <= 1
    assert (np.diff(cycle, axis=0).sum(axis=1) == 4096).all()
    assert (np.diff(cycle, axis=0) >= 0).all()


def test_rare_sources_come_at_their_rate() -> None:
    mixed = MixedStream([stream_of(2, 0), stream_of(2, 1)], (1 - 1e-4, 1e-4))
    counts = Counter(mixed.sources(np.arange(4096 * 64), seed=0).tolist())
    assert abs(counts[1] - 26.2) < 2  # 0.41 rows a block
    assert mixed._chosen(np.array([10**12]), 0)[1][0] == pytest.approx(10**12, rel=1e-3)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    found = {}
    for number, name in enumerate(("web", "code", "other")):
        file = write_jsonl(folder / f"{name}.jsonl", sentences(200, seed=number))
        trained = folder / "web/tokenizer" if name == "code" else None
        found[name] = folder / name
        tokenizer = None if trained is None else str(trained)
        data.prepare([file], found[name], tokenizer=tokenizer, vocab_size=350, validation_fraction=0.2)
    return found


def test_a_mixture_has_what_training_needs(stores: dict[str, Path]) -> None:
    mixture = data.Mixture.open({name: stores[name] for name in ("web", "code")}, {"code": 1, "web": 3})
    web, code = (data.TextData.open(stores[name]) for name in ("web", "code"))
    assert mixture.weights == {"web": 0.75, "code": 0.25}
    assert (mixture.vocab_size, mixture.tokenizer_path) == (web.vocab_size, web.tokenizer_path)
    assert mixture.tokenizer_fingerprint == code.tokenizer_fingerprint
    assert mixture.end_token is None
    assert mixture.train.windows(20) == web.train.windows(20) + code.train.windows(20)
    shorter = min(store.train.token_count for store in (web, code))
    assert mixture.train.windows(shorter) > 0 == mixture.train.windows(shorter + 1)
    assert mixture.train.token_count == web.train.token_count + code.train.token_count
    assert {name: held.token_count for name, held in mixture.validations.items()} == {
        "web": web.validation.token_count,
        "code": code.validation.token_count,
    }
    assert mixture.summary()["sources"]["code"] == {"weight": 0.25, **code.summary()}
    mixture.verify()
    batch = mixture.train.batch(4, 16, 20, seed=1)
    assert batch["labels"].shape == (16, 20)
    numbers = np.arange(64, 80)
    sources = mixture.train.sources(numbers, 1)
    assert set(sources) == {0, 1}
    assert ((batch["labels"] == -100) == (batch["position_ids"] == 0)).all()


def test_mixtures_that_do_not_fit(stores: dict[str, Path], tmp_path: Path) -> None:
    two = {name: stores[name] for name in ("web", "code")}
    with fails("'web' and 'other'", "same --tokenizer"):
        data.Mixture.open({"web": stores["web"], "other": stores["other"]}, {"web": 1, "other": 1})
    with fails("weights are for web", "sources are web, code"):
        data.Mixture.open(two, {"web": 1})
    for weight in (0, -1.0, float("nan"), float("inf")):
        with fails(f"'code' is {weight}", "positive"):
            data.Mixture.open(two, {"web": 1, "code": weight})
    with fails("'code'", "1e-07"):
        data.Mixture.open(two, {"web": 1, "code": 1e-7})
    with fails("weights", "missing"):
        data.Mixture.open({}, {})
    tokenizer = str(stores["web"] / "tokenizer")
    file = write_jsonl(tmp_path / "a.jsonl", sentences(100))
    data.prepare([file], tmp_path / "ended", tokenizer=tokenizer, end_token=True)
    with fails("end tokens"):
        data.Mixture.open({"web": stores["web"], "ended": tmp_path / "ended"}, {"web": 1, "ended": 1})

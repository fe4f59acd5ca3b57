"""Text tokenised while it is trained on: the same rows however they are asked for, and after a resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from texts import fails, sentences, write_jsonl, write_parquet

from keyshift import data

FRACTION = 0.2


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.streaming, "_CHUNK_DOCUMENTS", 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    data.train_tokenizer(sentences(300), 400).save_pretrained(folder / "tokenizer")
    write_jsonl(folder / "files/a.jsonl", sentences(60))
    write_jsonl(folder / "files/b.jsonl", sentences(50, seed=1))
    (folder / "dataset").mkdir()
    for part in range(2):
        write_parquet(folder / f"dataset/train-{part}.parquet", {"text": sentences(60, seed=part)})
    return folder


def source(folder: Path, kind: str) -> data.FileSource | data.DatasetSource:
    return (
        data.FileSource([folder / "files"])
        if kind == "files"
        else data.DatasetSource(str(folder / "dataset"))
    )


def opened(folder: Path, kind: str = "files", **changes: Any) -> data.StreamedText:
    options = {"validation_fraction": FRACTION, **changes}
    return data.StreamedText(source(folder, kind), str(folder / "tokenizer"), folder / "run", **options)


def all_rows(folder: Path, kind: str, count: int, length: int) -> dict[str, torch.Tensor]:
    """What the rows should be: the documents of the training side, again and again, end to end."""
    tokenizer = data.load_tokenizer(folder / "tokenizer")
    documents = [text for text in source(folder, kind).read() if not data.in_validation(text, FRACTION)]
    encoded = [
        np.array([0, *tokenizer.encode(text, add_special_tokens=False), 0], np.uint16) for text in documents
    ]
    epoch = np.concatenate(encoded)
    epochs = count * length // len(epoch) + 1
    starts = np.cumsum([0, *(len(each) for each in encoded)])[:-1]
    shards = [data.MemoryShard(epoch, starts.astype(np.int64), 1)] * epochs
    return data.TokenStream(shards).packed(np.arange(count) * length, length)


@pytest.mark.parametrize("kind", ["files", "dataset"])
def test_rows_are_the_documents_in_order_over_and_over(folder: Path, kind: str) -> None:
    expected = all_rows(folder, kind, 200, 50)
    stream = opened(folder, kind).train
    found = [stream.rows(first, 8, 50) for first in range(0, 200, 8)]
    for name, rows in expected.items():
        assert torch.equal(torch.cat([batch[name] for batch in found]), rows), name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 9)), max_size=8), st.integers(1, 70))
def test_any_rows_in_any_order(folder: Path, asked: list[tuple[int, int]], length: int) -> None:
    expected = all_rows(folder, "files", 160, length)["input_ids"]
    stream = opened(folder).train
    for first, count in asked:
        assert torch.equal(stream.rows(first, count, length)["input_ids"], expected[first : first + count])


@pytest.mark.parametrize("kind", ["files", "dataset"])
@pytest.mark.parametrize("anchors", [4096, 3])
def test_a_resumed_stream_goes_on_with_another_number_of_ranks(
    folder: Path, kind: str, anchors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with half a batch each save after a step; one alone goes on. With few states kept: replay."""
    monkeypatch.setattr(data.streaming, "_ANCHORS", anchors)
    expected = all_rows(folder, kind, 200, 40)["input_ids"]
    for steps in (0, 1, 5, 17, 29):  # the last is in the third epoch
        ranks = [opened(folder, kind).train for _ in range(2)]
        for step in range(steps):
            for rank, stream in enumerate(ranks):
                first = step * 6 + rank * 3
                assert torch.equal(stream.rows(first, 3, 40)["input_ids"], expected[first : first + 3])
        state = json.loads(json.dumps(ranks[0].state_dict(steps * 6, 40)))
        resumed = opened(folder, kind).train
        resumed.load_state_dict(state)
        for first in (steps * 6, steps * 6 + 6):
            assert torch.equal(resumed.rows(first, 6, 40)["input_ids"], expected[first : first + 6])


def test_a_resumption_does_not_tokenise_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened(folder).train
    stream.rows(20, 4, 40)
    state = stream.state_dict(24, 40)
    resumed = opened(folder).train
    tokenised: list[str] = []
    encoded = data.encoding.Encoder.encoded

    def recorded(self: Any, documents: Any) -> Any:
        return encoded(self, (tokenised.append(each) or each for each in documents))  # type: ignore[func-returns-value]

    monkeypatch.setattr(data.encoding.Encoder, "encoded", recorded)
    resumed.load_state_dict(state)
    resumed.rows(24, 1, 40)
    assert 0 < len(tokenised) <= 14  # two chunks
    assert tokenised[0] != next(iter(data.FileSource([folder / "files"]).read()))


def test_the_state_of_other_text_is_refused(folder: Path, tmp_path: Path) -> None:
    state = opened(folder).train.state_dict(0, 10)
    with fails("other text"):
        opened(folder, "dataset").train.load_state_dict(state)
    with fails("other text"):
        opened(folder, validation_fraction=0.1).train.load_state_dict(state)


def test_held_out_documents_are_those_of_the_first_part(folder: Path) -> None:
    documents = list(data.FileSource([folder / "files"]).read())
    tokenizer = data.load_tokenizer(folder / "tokenizer")
    for limit in (1500, 10**9):
        text = opened(folder, validation_bytes=limit)
        part: list[str] = []
        for document in documents:
            if sum(map(len, part)) < limit:
                part.append(document)
        held_out = [each for each in part if data.in_validation(each, FRACTION)]
        assert [tokenizer.decode(tokens) for tokens in text.validation.documents()] == held_out
        assert text.validations == {"text": text.validation}
        assert text.summary()["validation"]["documents"] == len(held_out)
    with fails("validation_fraction is 1e-09", "holds out no document"):
        opened(folder, validation_fraction=1e-9)
    with fails("holds no document to train on"):
        opened(folder, validation_fraction=1 - 1e-9).train.rows(0, 1, 10)


def test_the_tokenizer_is_saved_once(folder: Path, tmp_path: Path) -> None:
    text = opened(folder)
    assert text.tokenizer_path == folder / "run/tokenizer"
    assert (text.vocab_size, text.end_token) == (400, 0)
    assert [path.name for path in (folder / "run").iterdir()] == ["tokenizer"]
    data.train_tokenizer(sentences(300), 300).save_pretrained(tmp_path / "other")
    with fails("holds another tokenizer"):
        data.StreamedText(source(folder, "files"), str(tmp_path / "other"), folder / "run")
    assert [path.name for path in (folder / "run").iterdir()] == ["tokenizer"]

"""Real text: what is read, where it is cut, which side it goes to, and what the batches of it mean."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from texts import fails, sentences, write, write_jsonl, write_parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from keyshift import data

KIB = 1024


def read(*files: Path) -> list[str]:
    return list(data.read_documents(files))


# Finding files


def test_folder_is_searched_recursively_without_hidden_files(tmp_path: Path) -> None:
    wanted = [
        write(tmp_path / name) for name in ("a.txt", "b/c.MD", "b/d/e.jsonl", "b/d/f.Parquet", "z.tar.txt")
    ]
    for name in ("a.py", "README", ".hidden.txt", ".git/x.txt", "b/.cache/deep/y.md", "txt"):
        write(tmp_path / name)
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert data.find_files([tmp_path]) == wanted


def test_files_come_sorted_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a.txt"), write(tmp_path / "b.txt")
    (tmp_path / "link.txt").symlink_to(first)
    monkeypatch.chdir(tmp_path)
    paths: list[str | Path] = ["b.txt", tmp_path, str(first), "./a.txt", "*.txt", "[a].txt"]
    assert data.find_files(paths) == [first, second]


def test_globs(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.py", "x/d.txt", "x/y/e.txt", ".h/f.txt", "x/.g.txt"):
        write(tmp_path / name)

    def names(pattern: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in data.find_files([f"{tmp_path}/{pattern}"])]

    assert names("*.txt") == ["a.txt"]
    assert names("**/*.txt") == ["a.txt", "x/d.txt", "x/y/e.txt"]
    assert names("[ab].*") == ["a.txt", "b.md"]
    assert names("x*") == ["x/d.txt", "x/y/e.txt"]  # like the folder that a shell would have put there


def test_a_name_with_glob_characters_can_be_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a[1].txt")
    write(tmp_path / "a1.txt")
    assert data.find_files([file]) == [file]


def test_hidden_file_named_outright_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / ".corpus/.a.txt")
    assert data.find_files([file]) == [file]


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("nowhere", ["no such file or folder"]),
        ("nowhere/*.txt", ["no text files", ".jsonl"]),
        ("empty", ["no text files", ".txt, .md, .jsonl, .parquet"]),
        ("a.csv", ["unsupported suffix", ".parquet"]),
    ],
)
def test_paths_that_name_no_text(tmp_path: Path, path: str, parts: list[str]) -> None:
    write(tmp_path / "a.csv")
    write(tmp_path / "empty/.hidden.txt")
    good = write(tmp_path / "good.txt")
    with fails(repr(f"{tmp_path}/{path}"), *parts):
        data.find_files([good, f"{tmp_path}/{path}"])


def test_no_paths() -> None:
    with fails("none given"):
        data.find_files([])


@pytest.fixture
def readable_by_all() -> Iterator[Path]:
    """A folder outside pytest's, which only its owner can enter; the test runs without root's rights."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        user = os.geteuid()
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


def test_unreadable_file_and_folder(readable_by_all: Path) -> None:
    secret = write(readable_by_all / "secret.txt")
    secret.chmod(0)
    locked = write(readable_by_all / "in/locked/a.txt").parent
    write(readable_by_all / "in/b.txt")
    locked.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with fails(secret, "Permission denied"):
        data.find_files([secret])
    with fails(locked, "Permission denied"):
        data.find_files([readable_by_all / "in"])


# Reading documents


def test_short_text_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = " α\r\n\r\n\n\nβ\t€😀 \n"
    assert read(write(tmp_path / "a.txt", text), write(tmp_path / "b.md", text + "x")) == [text, text + "x"]
    longest = "a\n\n" * (16 * KIB // 3) + "b"
    assert len(longest) == 16 * KIB
    assert read(write(tmp_path / "c.txt", longest)) == [longest]


def test_byte_order_mark_is_dropped_only_at_the_start(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "\ufeffa\ufeff")) == ["a\ufeff"]
    start = "x" * 16 * KIB + "\n\n"
    assert read(write(tmp_path / "b.txt", start + "\ufeffy")) == [start, "\ufeffy"]
    assert read(write(tmp_path / "a.jsonl", '\ufeff{"text": "a"}\n{"text": "b"}')) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("x" * 16 * KIB + "\n" + "y" * 100 + "\n \n" + "z", [16 * KIB + 104, 1]),
        ("x" * 16 * KIB + "\n" + "y" * 100, [16 * KIB + 1, 100]),
        ("x\n\n" * 10 + "y" * 75 * KIB, [32 * KIB, 32 * KIB, 11 * KIB + 30]),
        ("x" * 25 * KIB, [25 * KIB]),
    ],
)
def test_long_text_is_cut(tmp_path: Path, text: str, lengths: list[int]) -> None:
    pieces = read(write(tmp_path / "a.txt", text))
    assert [len(piece) for piece in pieces] == lengths
    assert "".join(pieces) == text


@given(st.text("ab \n\r\té€😀", max_size=120))
@example("a" * 7 + "😀" * 9)
@example("aaaaaaaa" + "\n" + "b\n\n" + "é" * 8)
def test_cuts_follow_the_rule_and_lose_nothing(text: str) -> None:
    limit = 8
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(data.documents, "_DOCUMENT_BYTES", limit):
        file = write(Path(folder, "a.txt"), text)
        pieces = [piece.encode() for piece, _ in data.documents._read_text(file, "text")]
    assert b"".join(pieces) == text.encode()
    rest = text.encode()
    for piece in pieces:
        blank = re.search(rb"\n[ \t\r]*\n", rest[limit : 2 * limit])
        newline = rest.find(b"\n", limit, 2 * limit)
        if len(rest) <= limit:
            assert piece == rest
        elif blank:
            assert len(piece) == limit + blank.end()
        elif newline >= 0:
            assert len(piece) == newline + 1
        else:  # whole characters, as many as fit
            assert piece == rest[: 2 * limit].decode(errors="ignore").encode()
        rest = rest[len(piece) :]


@pytest.mark.parametrize("before", [0, 3, 16 * KIB, 32 * KIB - 1, 32 * KIB, 75 * KIB])
@pytest.mark.parametrize(
    ("bad", "what"),
    [(b"\0", "binary"), (b"\xff", "UTF-8"), (b"\xe2\x82", "UTF-8"), (b"\xed\xa0\x80", "UTF-8")],
)
def test_bad_bytes_are_located(tmp_path: Path, before: int, bad: bytes, what: str) -> None:
    for after in (b"", b" and more"):
        file = write(tmp_path / "a.txt", b"x" * before + bad + after)
        with fails(file, what, f"at byte {before}"):
            read(file)


def test_jsonl(tmp_path: Path) -> None:
    content = '{"text": "a\\nb\\u0000", "id": 1}\r\n\n  \n{"id": 2, "text": "é"}\n{"text": " "}\n{"text": ""}'
    assert read(write(tmp_path / "a.jsonl", content)) == ["a\nb\0", "é"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a"',
        b'{"text": "a"} {"text": "b"}',
        b'"text"',
        b'["text"]',
        b"null",
        b'{"txt": "a"}',
        b'{"text": null}',
        b'{"text": ["a"]}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "a", "n": ' + b"1" * 5000 + b"}",
    ],
)
def test_malformed_jsonl_line_is_located(tmp_path: Path, line: bytes) -> None:
    file = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with fails(f"{file}:3:", '{"text": "..."}'):
        read(file)


def test_parquet(tmp_path: Path) -> None:
    documents = sentences(1000)
    table = {"id": range(1003), "text": [*documents[:500], None, "", " \n", *documents[500:]]}
    assert read(write_parquet(tmp_path / "a.parquet", table, row_group_size=300)) == documents
    encoded = pa.array(documents[:9]).dictionary_encode()
    assert read(write_parquet(tmp_path / "b.parquet", {"text": encoded})) == documents[:9]


def test_parquet_errors(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"content": ["a"], "id": [1]})
    with fails(file, 'no column "text"', "content, id"):
        read(file)
    for values in ([1, 2], [["a"]], [b"a"]):
        write_parquet(file, {"text": values})
        with fails(file, 'column "text"', "strings"):
            read(file)
    write(file, b"no parquet at all")
    with fails(file, "corrupt", "row 0"):
        read(file)
    write_parquet(file, {"text": sentences(20_000)}, row_group_size=10_000)
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 20_000] = b"\xa5" * 20_000
    write(file, bytes(content))
    with fails(file, "corrupt"):
        read(file)


def test_nothing_to_read(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.txt", ""),
        write(tmp_path / "b.txt", "\ufeff"),
        write(tmp_path / "c.md", "\n "),
    ]
    with fails("no text"):
        read(*files)
    with fails(tmp_path / "gone.txt", "No such file"):
        read(tmp_path / "gone.txt")


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_big_files_are_streamed(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    document = "word " * 10_000
    count = 1200
    if suffix == ".txt":
        write(file, (document + "\n\n") * count)
    elif suffix == ".jsonl":
        write_jsonl(file, [document] * count)
    else:
        write_parquet(file, {"text": [document] * count}, use_dictionary=False, row_group_size=count)

    total = 0

    def consume() -> None:
        nonlocal total
        total = sum(len(text) for text in data.read_documents([file]))

    # A batch of 256 parquet rows is the largest thing held.
    assert peak_bytes(consume) < (20e6 if suffix == ".parquet" else 1e6)
    assert total >= count * len(document) == 60e6


# Tokenizers and the split


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    data.train_tokenizer(sentences(300), 400).save_pretrained(folder)
    return str(folder)


def test_trained_tokenizer() -> None:
    tokenizer = data.train_tokenizer((text for text in sentences(300)), 400)
    assert len(tokenizer) == 400
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert data.separator_id(tokenizer) == 0
    bare = tokenizer.encode("so", "it", add_special_tokens=False)
    assert tokenizer.encode("so") == [0, *tokenizer.encode("so", add_special_tokens=False)]
    assert tokenizer.encode("so", "it") == [0, *bare]
    assert all(byte in tokenizer.get_vocab() for byte in pre_tokenizers.ByteLevel.alphabet())
    again = data.train_tokenizer(iter(sentences(300)), 400)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_training_documents_are_streamed() -> None:
    document = "the same few words " * 1000
    assert peak_bytes(lambda: data.train_tokenizer((document + str(i) for i in range(1500)), 300)) < 9e6


def test_tokenizer_errors(tmp_path: Path) -> None:
    with fails("vocab_size is 256", "257"):
        data.train_tokenizer(["a"], 256)
    write(tmp_path / "broken/tokenizer.json", '{"model')
    for name in ("missing", "broken", ""):
        with fails(repr(f"{tmp_path}/{name}"), "cannot be loaded"):
            data.load_tokenizer(f"{tmp_path}/{name}")


def word_tokenizer(vocabulary: dict[str, int], **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_separator_is_bos_then_eos() -> None:
    vocabulary = {"?": 0, "<s>": 1, "</s>": 2}
    assert data.separator_id(word_tokenizer(vocabulary, bos_token="<s>", eos_token="</s>")) == 1
    assert data.separator_id(word_tokenizer(vocabulary, eos_token="</s>")) == 2
    with fails("neither a bos nor an eos"):
        data.separator_id(word_tokenizer(vocabulary))


def test_split_depends_on_content_and_fraction() -> None:
    documents = sentences(4000)
    held_out = [text for text in documents if data.in_validation(text, 0.05)]
    assert 140 <= len(held_out) <= 260
    assert all(data.in_validation(text, 0.2) for text in held_out)
    assert [data.in_validation(text, 0.5) for text in ("a", "b", "é", "")] == [True, False, False, False]


# Streams


def stream_of(*shards: list[int]) -> data.TokenStream:
    """Documents of so many tokens in each shard, each numbered on so that a token tells its place."""
    made: list[data.MemoryShard] = []
    first = 0
    for lengths in shards:
        starts = np.cumsum([0, *lengths], dtype=np.int64)[:-1]
        tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
        made.append(data.MemoryShard(tokens, starts, sum(lengths)))
        first += sum(lengths)
    return data.TokenStream(made)


shards = st.lists(st.lists(st.integers(1, 12), max_size=9), min_size=1, max_size=6)
streams = shards.filter(any).map(lambda lengths: stream_of(*lengths))


def tokens(stream: data.TokenStream) -> np.ndarray:
    """All tokens of a stream."""
    return np.concatenate([shard.tokens for shard in stream.shards])


def document_starts(stream: data.TokenStream) -> list[int]:
    """Where the documents of a stream begin in it."""
    ends = np.cumsum([0, *(shard.token_count for shard in stream.shards)])
    return [
        start + int(end)
        for shard, end in zip(stream.shards, ends, strict=False)
        for start in shard.document_starts.tolist()
    ]


def check_windows(stream: data.TokenStream, batch: dict[str, torch.Tensor]) -> None:
    """Against the definition, token by token; in these streams a token is its own place."""
    starts = set(document_starts(stream))
    for row in range(len(batch["input_ids"])):
        position = 0
        for column, token in enumerate(batch["input_ids"][row].tolist()):
            if column > 0:
                assert token == batch["input_ids"][row, 0] + column
            position = 0 if column == 0 or token in starts else position + 1
            assert batch["position_ids"][row, column] == position
            assert batch["labels"][row, column] == (-100 if position == 0 else token)


@given(streams, st.integers(0, 40), st.integers(1, 5), st.integers(1, 16), st.integers(0, 3))
def test_batch_keeps_document_boundaries(
    stream: data.TokenStream, step: int, batch_size: int, length: int, seed: int
) -> None:
    length = min(length, stream.token_count)
    batch = stream.batch(step, batch_size, length, seed)
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    for tensor in batch.values():
        assert tensor.shape == (batch_size, length)
        assert tensor.dtype == torch.int64
    check_windows(stream, batch)


@given(streams, st.integers(1, 5), st.integers(1, 8), st.integers(0, 3))
def test_every_epoch_packs_every_window_once(
    stream: data.TokenStream, batch_size: int, length: int, seed: int
) -> None:
    length = min(length, stream.token_count)
    windows = stream.token_count // length
    steps = math.ceil(2 * windows / batch_size)
    rows = torch.cat([stream.batch(step, batch_size, length, seed)["input_ids"] for step in range(steps)])
    for epoch in range(2):
        tokens = rows[epoch * windows : (epoch + 1) * windows].flatten().sort().values
        assert tokens.tolist() == list(range(windows * length))


def test_batch_is_a_pure_function_of_its_arguments() -> None:
    lengths = [7] * 60

    def batches(order: list[tuple[int, int]]) -> dict[tuple[int, int], list[Any]]:
        data.order._table.cache_clear()
        stream = stream_of(lengths)
        return {
            (step, seed): [tensor.tolist() for tensor in stream.batch(step, 4, 10, seed).values()]
            for step, seed in order
        }

    order = [(step, seed) for step in range(30) for seed in range(3)]
    expected = batches(order)
    assert batches(order[::-1]) == expected
    random.Random(0).shuffle(order)
    assert batches(order) == expected
    assert batches([(17, 2)])[17, 2] == expected[17, 2]
    windows = len(lengths) * 7 // 10
    orders = {
        tuple(data.order._table(windows, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9  # each seed and epoch has its own


@given(streams, st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_sequential_spreads_evenly(
    stream: data.TokenStream, batch_size: int, length: int, max_batches: int
) -> None:
    length = min(length, stream.token_count)
    windows = stream.token_count // length
    batches = list(stream.sequential(batch_size, length, max_batches))
    for batch in batches:
        check_windows(stream, batch)
    sizes = [len(batch["labels"]) for batch in batches]
    assert sum(sizes) == min(windows, batch_size * max_batches)
    assert all(size == batch_size for size in sizes[:-1])
    first = torch.cat([batch["input_ids"][:, 0] for batch in batches]) // length
    steps = torch.diff(first, append=torch.tensor([windows]))
    assert first[0] == 0
    assert steps.min() >= 1
    assert steps.max() - steps.min() <= 1
    again = list(stream.sequential(batch_size, length, max_batches))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(batches, again, strict=True) for name in a)


def test_summary_and_bits_per_byte() -> None:
    validation = data.TokenStream([data.MemoryShard(np.zeros(10, np.uint16), np.array([0, 4]), 16)])
    text = data.TextData(Path("tokenizer"), 300, stream_of([5, 6, 7]), validation)
    # 8 predicted tokens of 3 bits each make 24 bits, for 16 bytes.
    assert text.bits_per_byte(3 * math.log(2)) == pytest.approx(1.5)
    assert text.summary() == {
        "train": {"tokens": 18, "bytes": 18, "documents": 3},
        "validation": {"tokens": 10, "bytes": 16, "documents": 2},
        "vocab_size": 300,
        "tokens_per_byte": 0.5,
    }


# The prepared store


def prepare(paths: list[Path], directory: Path, tokenizer: str | None, **changes: Any) -> data.TextData:
    options: dict[str, Any] = {"vocab_size": 400, "sequence_length": 8, "batch_size": 2} | changes
    return data.prepare(paths, directory, tokenizer=tokenizer, **options)


def stored_documents(text: data.TextData, stream: data.TokenStream) -> list[str]:
    """The documents decoded from the store, which must consist of nothing else."""
    tokenizer = data.load_tokenizer(text.tokenizer_path)
    pieces = np.split(tokens(stream), document_starts(stream))
    assert len(pieces[0]) == 0
    assert all(piece[0] == tokenizer.bos_token_id for piece in pieces[1:])
    documents = [tokenizer.decode(piece[1:]) for piece in pieces[1:]]
    assert sum(len(document.encode()) for document in documents) == stream.text_bytes
    return documents


def check_store(text: data.TextData, documents: list[str], fraction: float = 0.05) -> None:
    """Every document is on its side, once, in order, and decodes to itself."""
    for stream, held_out in ((text.train, False), (text.validation, True)):
        expected = [document for document in documents if data.in_validation(document, fraction) == held_out]
        assert stored_documents(text, stream) == expected


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", sentences(200))
    return folder


def test_prepare_every_format(tmp_path: Path) -> None:
    documents = sentences(600)
    write_jsonl(tmp_path / "in/a.jsonl", documents[:400])
    write_parquet(tmp_path / "in/b.parquet", {"text": documents[400:]})
    for number in range(30):
        documents.append(f"{number} in a file of its own\n")
        write(tmp_path / f"in/text/{number:02}.txt", documents[-1])
    seen: list[str] = []
    train_tokenizer = data.train_tokenizer

    def recorded(stream: Iterator[str], vocab_size: int) -> Any:
        return train_tokenizer((seen.append(text) or text for text in stream), vocab_size)  # type: ignore[func-returns-value]

    with mock.patch.object(data.preparing, "train_tokenizer", recorded):
        text = prepare([tmp_path / "in"], tmp_path / "store", None)
    check_store(text, documents)
    assert seen == [document for document in documents if not data.in_validation(document, 0.05)]
    assert text.vocab_size == len(data.load_tokenizer(text.tokenizer_path)) == 400
    assert tokens(text.train).dtype == np.uint16
    assert text.summary()["train"]["documents"] == len(seen)
    batch = text.train.batch(0, 2, 8, seed=0)
    starts = batch["input_ids"] == 0
    starts[:, 0] = True
    assert torch.equal(batch["position_ids"] == 0, starts)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=st.lists(st.text(min_size=1, max_size=40).filter(lambda text: not text.isspace()), max_size=8)
)
@example(documents=["<|endoftext|>", "a<|endoftext|><|endoftext|>b", "\0", "\r\n x  y \u2028 ,. 's"])
def test_any_text_round_trips(tokenizer_folder: str, documents: list[str]) -> None:
    documents = [*documents, *sentences(20), *documents]  # duplicates, and enough to fill both sides
    with tempfile.TemporaryDirectory() as folder:
        file = write_jsonl(Path(folder, "a.jsonl"), documents)
        text = prepare(
            [file],
            Path(folder, "store"),
            tokenizer_folder,
            batch_size=1,
            sequence_length=1,
            validation_fraction=0.5,
        )
        check_store(text, documents, 0.5)
        for stream in (text.train, text.validation):  # no token of a text passes for a separator
            assert np.flatnonzero(tokens(stream) == 0).tolist() == document_starts(stream)
        sides = [set(stored_documents(text, stream)) for stream in (text.train, text.validation)]
        assert not sides[0] & sides[1]
        assert sides[0] | sides[1] == set(documents)


def test_tokenising_in_small_batches_changes_nothing(
    tmp_path: Path, corpus: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare([corpus], tmp_path / "whole", tokenizer_folder)
    monkeypatch.setattr(data.encoding, "_BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(data.encoding, "_BATCH_CHARACTERS", 200)
    parts = prepare([corpus], tmp_path / "parts", tokenizer_folder)
    assert np.array_equal(tokens(whole.train), tokens(parts.train))
    assert document_starts(whole.validation) == document_starts(parts.validation)


def test_ids_beyond_16_bits(tmp_path: Path, corpus: Path) -> None:
    words = Counter(re.findall(r"\w+", " ".join(sentences(200))))
    vocabulary = {"?": 0, "<s>": 1, **{word: 65_530 + rank for rank, word in enumerate(sorted(words))}}
    word_tokenizer(vocabulary, bos_token="<s>").save_pretrained(tmp_path / "words")
    text = prepare([corpus], tmp_path / "store", str(tmp_path / "words"))
    assert tokens(text.train).dtype == np.uint32
    assert text.vocab_size == max(vocabulary.values()) + 1  # rows an embedding needs, not words
    first = next(text for text in sentences(200) if not data.in_validation(text, 0.05))
    expected = [1, *(vocabulary.get(word, 0) for word in re.findall(r"\w+|[^\w\s]+", first))]
    assert tokens(text.train)[: len(expected)].tolist() == expected


def test_store_is_reused_and_reopened(tmp_path: Path, corpus: Path) -> None:
    store = tmp_path / "store"
    first = prepare([corpus], store, None)
    with mock.patch.object(data.store, "write_store", side_effect=AssertionError("worked again")):
        again = prepare([corpus / "*.jsonl"], store, None, batch_size=3, sequence_length=5)
    for text in (again, data.TextData.open(str(store))):
        assert text.summary() == first.summary()
        assert text.tokenizer_path == store / "tokenizer"
        assert np.array_equal(tokens(text.train), tokens(first.train))


def test_store_is_rebuilt_when_anything_changes(tmp_path: Path, corpus: Path, tokenizer_folder: str) -> None:
    store = tmp_path / "store"
    build = data.store.write_store

    def builds(**options: Any) -> bool:
        with mock.patch.object(data.store, "write_store", side_effect=build) as spy:
            prepare([corpus], store, options.pop("tokenizer", None), **options)
        return spy.called

    assert builds()
    assert not builds()
    assert builds(vocab_size=300)
    assert builds(validation_fraction=0.3)
    assert builds(tokenizer=tokenizer_folder)
    assert not builds(tokenizer=tokenizer_folder, vocab_size=300)  # has no say when a tokenizer is given
    os.utime(Path(tokenizer_folder, "tokenizer.json"))
    assert builds(tokenizer=tokenizer_folder)
    write(corpus / "more.txt")
    assert builds(tokenizer=tokenizer_folder)
    os.utime(corpus / "more.txt", ns=(1, 1))
    assert builds(tokenizer=tokenizer_folder)
    (store / "00000.train.tokens").unlink()
    assert builds(tokenizer=tokenizer_folder)
    write(store / "meta.json", b"\xff cut off")
    assert builds(tokenizer=tokenizer_folder)
    assert not builds(tokenizer=tokenizer_folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "store"]


@pytest.mark.parametrize("call", range(4))
@pytest.mark.parametrize("older", [False, True])
def test_interruption_leaves_things_as_they_were(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, call: int, older: bool
) -> None:
    monkeypatch.setattr(data.preparing, "_PROGRESS_BYTES", corpus.joinpath("a.jsonl").stat().st_size * 2 // 3)
    store = tmp_path / "store"
    before = prepare([corpus], store, None).summary() if older else None
    calls = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        if calls == call:
            raise KeyboardInterrupt
        calls += 1

    with pytest.raises(KeyboardInterrupt):
        prepare([corpus], store, None, vocab_size=300, progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", *["store"] * older]
    if older:
        with mock.patch.object(
            data.store, "write_store", side_effect=AssertionError("the older store was lost")
        ):
            assert prepare([corpus], store, None).summary() == before


def test_failure_while_reading_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    write(corpus / "z.txt", b"\xff")
    with fails("z.txt", "UTF-8"):
        prepare([corpus], tmp_path / "store", None)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_progress(tmp_path: Path, corpus: Path, tokenizer_folder: str) -> None:
    write_parquet(corpus / "b.parquet", {"text": sentences(300, seed=1)})
    write(corpus / "c.txt", "words\n" * 50_000)
    size = sum(file.stat().st_size for file in corpus.iterdir())
    with mock.patch.object(data.preparing, "_PROGRESS_BYTES", 10_000):
        for tokenizer, passes in ((tokenizer_folder, 1), (None, 2)):
            calls: list[tuple[int, int]] = []
            prepare(
                [corpus], tmp_path / "store", tokenizer, progress=lambda *call, log=calls: log.append(call)
            )
            done = [call[0] for call in calls]
            assert {call[1] for call in calls} == {passes * size}
            assert done == sorted(done)
            assert done[-1] == passes * size
            assert len(done) > 4 * passes


def test_sides_too_small_for_a_batch(tmp_path: Path, corpus: Path) -> None:
    counts = prepare([corpus], tmp_path / "store", None).summary()["validation"]
    held_out = f"validation holds {counts['tokens']} tokens in {counts['documents']} documents"
    with fails("for validation:", "train holds", held_out, "batch_size 20 x sequence_length 64 = 1280"):
        prepare([corpus], tmp_path / "store", None, batch_size=20, sequence_length=64)
    with fails("for train and validation:", "more text"):
        prepare([corpus], tmp_path / "store", None, batch_size=200, sequence_length=64)
    prepare([corpus], tmp_path / "store", None, batch_size=1, sequence_length=counts["tokens"])
    with fails("for validation:"):
        prepare([corpus], tmp_path / "store", None, batch_size=1, sequence_length=counts["tokens"] + 1)


@pytest.mark.parametrize(("text", "empty"), [("a", "train"), ("b", "validation")])
def test_a_side_without_documents(tmp_path: Path, text: str, empty: str) -> None:
    """Nothing of it is left to stand in the way of a second try."""
    file = write(tmp_path / "a.txt", text)
    way_out = "lower it" if empty == "train" else "raise it"
    with fails("validation_fraction is 0.5", f"of 1 documents it leaves none for {empty}", way_out):
        prepare([file], tmp_path / "s", None, batch_size=1, sequence_length=1, validation_fraction=0.5)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("sequence_length", 0), ("validation_fraction", 0.0), ("validation_fraction", 1.0)],
)
def test_numbers_out_of_range(tmp_path: Path, corpus: Path, name: str, value: float) -> None:
    with fails(f"{name} is {value}"):
        prepare([corpus], tmp_path / "store", None, **{name: value})


def test_a_directory_with_other_files_is_not_replaced(tmp_path: Path, corpus: Path) -> None:
    store = tmp_path / "store"
    prepare([corpus], store, None)
    notes = write(store / "notes.org", "months of work")
    prepare([corpus], store, None)  # nothing to replace
    with fails(repr(str(store)), "notes.org", "empty directory"):
        prepare([corpus], store, None, vocab_size=300)
    assert notes.read_text() == "months of work"
    for directory in (notes, notes / "store"):
        with fails(f"directory {str(directory)!r}"):
            prepare([corpus], directory, None)
    assert notes.read_text() == "months of work"


def test_memory_of_prepare_is_bounded(
    tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.encoding, "_BATCH_CHARACTERS", 32 * KIB)
    document = " ".join(sentences(10))
    peaks = []
    for count in (400, 1600):
        file = write(tmp_path / f"{count}.jsonl")
        write_jsonl(file, [f"{number} {document}" for number in range(count)])
        store = tmp_path / f"store{count}"
        peaks.append(peak_bytes(partial(prepare, [file], store, tokenizer_folder)))
    assert file.stat().st_size > 1e6
    assert peaks[1] < 1.2 * peaks[0] + 100e3


def test_import_is_quick() -> None:
    heavy = "{'torch', 'transformers', 'tokenizers', 'pyarrow'}"
    script = f"import sys, keyshift.data; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)

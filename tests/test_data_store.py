"""The sharded store: always the same bytes, whatever was killed, however many workers; damage is noticed."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from texts import fails, sentences, write, write_jsonl, write_parquet
from tokenizers import Tokenizer

from keyshift import data
from keyshift.errors import RunError, UserError

SHARD = 3000
"""Bytes: the corpus below makes some ten shards."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", sentences(100))
    write_parquet(folder / "b.parquet", {"text": sentences(150, seed=1)})
    write(folder / "c.txt", "\n\n".join(sentences(100, seed=2)))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    data.train_tokenizer(sentences(300), 400).save_pretrained(folder)
    return str(folder)


def prepare(source: Any, directory: Path, tokenizer: str | None, **changes: Any) -> data.TextData:
    paths = [source] if isinstance(source, Path) else source
    options: dict[str, Any] = {"vocab_size": 400, "validation_fraction": 0.2, "shard_bytes": SHARD} | changes
    return data.prepare(paths, directory, tokenizer=tokenizer, **options)


def content(directory: Path) -> dict[str, bytes]:
    """Every file of a store."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def digest(arrays: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


PARTS = ("input_ids", "position_ids", "labels")


@pytest.mark.parametrize("shard_bytes", [64 * 1024 * 1024, 5000])
def test_batches_are_those_of_the_first_release(tmp_path: Path, shard_bytes: int) -> None:
    """Hashes from before there were shards; measured results rest on them."""
    file = write_jsonl(tmp_path / "a.jsonl", sentences(500))
    text = data.prepare([file], tmp_path / "s", tokenizer=None, vocab_size=257, shard_bytes=shard_bytes)
    assert (len(text.train.shards) == 1) == (shard_bytes > 5000)
    batches = [
        text.train.batch(step, 5, 33, seed)[part]
        for step in (0, 1, 7, 500, 10**6)
        for seed in (0, 3)
        for part in PARTS
    ]
    assert digest(batches) == "3eb08e634a183d6228934f0c1b5e9b8f40e462e0a1a125b683f2c74876f1ce77"
    held_out = [batch[part] for batch in text.validation.sequential(4, 16, 6) for part in PARTS]
    assert digest(held_out) == "4d417ba920a22955696f7f6fbf9b2cb2d584d584791da59e67952d589c9837c1"
    for side, tokens in (
        ("train", "7305498f845a3428efec189147cb0fe9a9c656b27314eec9becb61bd6f7482a3"),
        ("validation", "25c895edc78cb72b3aeaccba52e3b844d8ad0113e767bc6ab8a21bb562a9c315"),
    ):
        files = sorted((tmp_path / "s").glob(f"*.{side}.tokens"))
        assert digest(path.read_bytes() for path in files) == tokens


def test_a_shard_is_a_block_of_whole_documents(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    text = prepare(corpus, tmp_path / "store", tokenizer)
    documents = list(data.read_documents(data.find_files([corpus])))
    sides = (text.train, text.validation)
    sizes = [sum(shard.text_bytes for shard in pair) for pair in zip(*(s.shards for s in sides), strict=True)]
    assert len(sizes) > 5
    longest = max(len(document.encode()) for document in documents)
    assert all(SHARD <= size < SHARD + longest for size in sizes[:-1])
    for stream, held_out in ((text.train, False), (text.validation, True)):
        loaded = data.load_tokenizer(tokenizer)
        decoded = [loaded.decode(tokens) for tokens in stream.documents()]
        assert decoded == [each for each in documents if data.in_validation(each, 0.2) == held_out]
        assert all(shard.document_starts[:1].tolist() in ([0], []) for shard in stream.shards)


def test_shard_size_changes_no_row(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    many = prepare(corpus, tmp_path / "many", tokenizer, shard_bytes=1)
    one = prepare(corpus, tmp_path / "one", tokenizer, shard_bytes=10**9)
    assert len(one.train.shards) == 1 < 200 < len(many.train.shards)
    numbers = np.array([0, 5, 10**9, 77, 5])
    for side in ("train", "validation"):
        rows = [getattr(text, side).rows(numbers, 70, seed=3) for text in (many, one)]
        assert all((rows[0][part] == rows[1][part]).all() for part in PARTS)


@pytest.mark.slow
def test_the_result_depends_neither_on_workers_nor_on_a_kill(
    tmp_path: Path, corpus: Path, tokenizer: str
) -> None:
    """Two workers, killed with their parent once a few shards are there, go on and make the same bytes."""
    prepare(corpus, tmp_path / "whole", tokenizer)
    script = (
        "import sys, time; from keyshift import data\n"
        "if __name__ == '__main__':\n"
        "    seen = lambda done, total: time.sleep(0.5)\n"  # or it is all done before the kill
        "    data.prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], validation_fraction=0.2,\n"
        f"        vocab_size=400, shard_bytes={SHARD}, workers=2, progress=seen)\n"
    )
    file = write(tmp_path / "script.py", script)
    store, staging = tmp_path / "store", tmp_path / ".store.partial"
    process = subprocess.Popen([sys.executable, file, corpus, store, tokenizer])
    deadline = time.monotonic() + 120
    while len(list(staging.glob("records/*.json"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(children) >= 2
    assert not psutil.wait_procs(children, timeout=20)[1], "workers outlived their parent"
    assert not store.exists()
    finished = [int(path.stem) for path in staging.glob("records/*.json")]
    files = [path for number in finished for path in staging.glob(f"store/{number:05}.*")]
    kept = {path.name: path.stat().st_mtime_ns for path in files}
    assert len(kept) == 4 * len(finished)
    prepare(corpus, store, tokenizer, workers=2)
    assert content(store) == content(tmp_path / "whole")
    assert not staging.exists()
    assert {name: (store / name).stat().st_mtime_ns for name in kept} == kept


@pytest.mark.parametrize("trained", [False, True])
def test_an_interruption_anywhere_is_taken_up(
    tmp_path: Path, corpus: Path, tokenizer: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every report of progress, one after the other, until there is none left to interrupt."""
    monkeypatch.setattr(data.preparing, "_PROGRESS_BYTES", 1500)
    name = None if trained else tokenizer
    whole = prepare(corpus, tmp_path / "whole", name)
    calls = interruptions = 0
    last: list[int] = []

    def interrupt(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        last.append(done)
        if calls > interruptions + 1:
            raise KeyboardInterrupt

    while True:
        try:
            calls = 0
            store = prepare(corpus, tmp_path / "store", name, progress=interrupt)
        except KeyboardInterrupt:
            interruptions += 1
            assert not (tmp_path / "store").exists()
            continue
        break
    assert interruptions > 3
    assert content(tmp_path / "store") == content(tmp_path / "whole")
    assert store.summary() == whole.summary()
    assert last[-1] == max(last)


def test_another_plan_does_not_go_on_with_these_shards(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    broken = write(folder / "z.txt", b"\xff")
    with fails("z.txt"):
        prepare(folder, tmp_path / "store", tokenizer)
    staging = tmp_path / ".store.partial"
    assert len(list(staging.glob("records/*.json"))) > 3
    write(broken, "now it is text")
    prepare(folder, tmp_path / "store", tokenizer, validation_fraction=0.4)
    prepare(folder, tmp_path / "fresh", tokenizer, validation_fraction=0.4)
    assert content(tmp_path / "store") == content(tmp_path / "fresh")
    assert not staging.exists()


def test_a_shard_that_was_damaged_while_waiting_is_made_again(
    tmp_path: Path, corpus: Path, tokenizer: str
) -> None:
    prepare(corpus, tmp_path / "whole", tokenizer)

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "store", tokenizer, progress=stop)
    staging = tmp_path / ".store.partial/store"
    (staging / "00001.train.tokens").write_bytes(b"")
    (staging / "00003.validation.documents").unlink()
    write(staging / ".00009.train.tokens.123.tmp")
    prepare(corpus, tmp_path / "store", tokenizer)
    assert content(tmp_path / "store") == content(tmp_path / "whole")


def test_two_at_once_are_refused(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    script = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True)"
    script += "; sys.stdin.read()"
    staging = tmp_path / ".store.partial"
    staging.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", script, staging / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        with fails(repr(str(tmp_path / "store")), "another process"):
            prepare(corpus, tmp_path / "store", tokenizer)
    finally:
        holder.kill()
        holder.communicate()
    prepare(corpus, tmp_path / "store", tokenizer)  # its lock went with it


def test_an_error_in_the_text_ends_the_workers_too(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    folder = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    write(folder / "z.jsonl", '{"text": "fine"}\n{"txt": 1}\n')
    with fails("z.jsonl:2", "txt"):
        prepare(folder, tmp_path / "store", tokenizer, workers=2)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_work_with_one_line(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a machine short of memory does, in the middle of the work; what was finished is taken up."""
    monkeypatch.setattr(data.preparing, "_PROGRESS_SECONDS", 0)
    monkeypatch.setattr(data.workers, "_POLL_SECONDS", 0.02)
    file = write_jsonl(tmp_path / "a.jsonl", sentences(20_000))
    settings = {"shard_bytes": 20_000}
    prepare(file, tmp_path / "whole", tokenizer, **settings)
    killed: list[int] = []

    def kill(done: int, total: int) -> None:
        for child in psutil.Process().children():
            if done > 100_000 and not killed and "spawn_main" in " ".join(child.cmdline()):
                child.kill()
                killed.append(child.pid)

    with pytest.raises(RunError, match="workers=2") as caught:
        prepare(file, tmp_path / "store", tokenizer, workers=2, progress=kill, **settings)
    assert "\n" not in str(caught.value)
    assert len(list((tmp_path / ".store.partial/records").iterdir())) > 3
    prepare(file, tmp_path / "store", tokenizer, **settings)
    assert content(tmp_path / "store") == content(tmp_path / "whole")


# Opening and verifying


def test_a_corrupt_file_is_named(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    text = prepare(corpus, tmp_path / "store", tokenizer)
    seen: list[tuple[int, int]] = []
    text.verify(lambda *call: seen.append(call))
    assert seen[-1][0] == seen[-1][1]
    files = [path for path in sorted((tmp_path / "store").glob("0*")) if path.stat().st_size][::7]
    assert len(files) > 2
    for path in files:
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        opened = data.TextData.open(tmp_path / "store")  # not looked at that closely
        with fails(path, "corrupt", "prepare it again"):
            opened.verify()
        path.write_bytes(before[:-1])
        with fails(path, "cut off", "prepare it again"):
            data.TextData.open(tmp_path / "store")
        path.unlink()
        with fails(path, "missing"):
            data.TextData.open(tmp_path / "store")
        path.write_bytes(before)
    text.verify()
    other = json.loads((text.tokenizer_path / "tokenizer.json").read_text())
    write(text.tokenizer_path / "tokenizer.json", json.dumps(other))
    with fails(text.tokenizer_path, "not the tokenizer"):
        text.verify()


def test_what_is_no_store(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    with fails(tmp_path / "nowhere", "not a prepared store"):
        data.TextData.open(tmp_path / "nowhere")
    prepare(corpus, tmp_path / "store", tokenizer)
    write(tmp_path / "store/meta.json", '{"format": 1')
    with fails(tmp_path / "store/meta.json", "damaged"):
        data.TextData.open(tmp_path / "store")
    write(tmp_path / "store/meta.json", '{"sides": {}}')
    with fails(tmp_path / "store/meta.json", "format 1"):
        data.TextData.open(tmp_path / "store")


def test_a_store_of_the_first_format_is_replaced(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    for name in ("meta.json", "train.tokens", "train.documents", "validation.tokens", "validation.documents"):
        write(tmp_path / "store" / name, "{}")
    write(tmp_path / "store/tokenizer/tokenizer.json", "{}")
    with fails("earlier version"):
        prepare(corpus, tmp_path / "store", tokenizer, keep=True)
    prepare(corpus, tmp_path / "store", tokenizer).verify()


def test_many_shards_take_no_open_files_and_pickle_by_name(
    tmp_path: Path, corpus: Path, tokenizer: str
) -> None:
    text = prepare(corpus, tmp_path / "store", tokenizer, shard_bytes=1)
    before = psutil.Process().num_fds()
    row = text.train.rows(np.arange(400), 10, 0)
    assert psutil.Process().num_fds() < before + 20 < before + len(text.train.shards)
    packed = pickle.dumps(text)
    tokens = sum(shard.tokens.nbytes for shard in text.train.shards)
    longer = pickle.dumps(prepare(corpus, tmp_path / "one", tokenizer, shard_bytes=10**9))
    assert len(longer) < tokens / 3
    assert (pickle.loads(packed).train.rows(np.arange(400), 10, 0)["input_ids"] == row["input_ids"]).all()
    with pytest.raises(ValueError, match="read-only"):
        text.train.shards[-1].tokens[0] = 1


# Tokenizers


def test_end_tokens_are_predicted_and_documents_still_begin_unpredicted(
    tmp_path: Path, corpus: Path, tokenizer: str
) -> None:
    """With bos = eos = pad: the label of every end is that token, that of every start is not counted."""
    ended = prepare(corpus, tmp_path / "ended", tokenizer, end_token=True)
    plain = prepare(corpus, tmp_path / "plain", tokenizer)
    assert (plain.end_token, ended.end_token) == (None, 0)
    assert data.load_tokenizer(tokenizer).pad_token_id == 0
    for side in ("train", "validation"):
        with_ends, without = getattr(ended, side), getattr(plain, side)
        assert with_ends.token_count == without.token_count + without.document_count
        assert with_ends.text_tokens == without.text_tokens
        assert all(map(np.array_equal, with_ends.documents(), without.documents()))
    batch = ended.train.rows(np.arange(ended.train.windows(50)), 50, 0)
    special = batch["input_ids"] == 0
    starts = batch["position_ids"] == 0
    assert ((batch["labels"] == -100) == starts).all()
    ends = special & ~starts
    assert (batch["labels"][ends] == 0).all()
    assert ends.sum() > 0.8 * ended.train.document_count
    inside = starts[:, 1:]  # of documents, not of windows
    assert special[:, :-1][inside].all()  # an end, then the start of the next
    assert inside[ends[:, :-1]].all()
    # A byte costs the same loss more tokens, as many as there are ends.
    predicted = ended.validation.token_count - ended.validation.document_count
    assert ended.bits_per_byte(1.0) == pytest.approx(
        plain.bits_per_byte(1.0) * predicted / plain.validation.text_tokens
    )


def test_bos_starts_and_eos_ends(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    changed = data.load_tokenizer(tokenizer)
    changed.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    changed.save_pretrained(tmp_path / "changed")
    text = prepare(corpus, tmp_path / "store", str(tmp_path / "changed"), end_token=True)
    shard = text.train.shards[0]
    starts = shard.document_starts
    assert set(shard.tokens[starts]) == {changed.bos_token_id}
    assert set(shard.tokens[starts[1:] - 1]) == {changed.eos_token_id} == {text.end_token}
    assert text.vocab_size == 402


def test_a_tokenizer_can_be_a_file(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    folder = prepare(corpus, tmp_path / "folder", tokenizer)
    alone = write(tmp_path / "mine.json", Path(tokenizer, "tokenizer.json").read_bytes())
    for name in (alone, Path(tokenizer, "tokenizer.json")):
        text = prepare(corpus, tmp_path / "file", str(name))
        assert np.array_equal(text.train.shards[0].tokens, folder.train.shards[0].tokens)
        assert text.tokenizer_fingerprint == folder.tokenizer_fingerprint
    bare = Tokenizer.from_file(str(alone))
    bare.save(str(tmp_path / "other.json"))
    content = (tmp_path / "other.json").read_text().replace("<|endoftext|>", "<|unheard of|>")
    write(tmp_path / "other.json", content)
    with fails("other.json", "neither a bos nor an eos"):
        prepare(corpus, tmp_path / "none", str(tmp_path / "other.json"))
    os.utime(alone)  # the file is an input
    before = (tmp_path / "file/meta.json").stat().st_ino
    prepare(corpus, tmp_path / "file", str(alone))
    assert (tmp_path / "file/meta.json").stat().st_ino != before


def test_a_tokenizer_is_trained_on_a_bounded_part(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.preparing, "TOKENIZER_BYTES", 2000)
    calls: list[tuple[int, int]] = []
    text = prepare(corpus, tmp_path / "store", None, progress=lambda *call: calls.append(call))
    taken: list[str] = []
    for document in data.read_documents(data.find_files([corpus])):
        if sum(len(each) for each in taken) < 2000 and not data.in_validation(document, 0.2):
            taken.append(document)
    expected = data.train_tokenizer(taken, 400).backend_tokenizer.to_str()
    assert data.load_tokenizer(text.tokenizer_path).backend_tokenizer.to_str() == expected
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert calls[-1] == (2000 + size, 2000 + size)


def test_too_little_text_for_a_row_is_an_error(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    text = prepare(corpus, tmp_path / "store", tokenizer)
    length = text.train.token_count
    assert (text.train.windows(length), text.train.windows(length + 1)) == (1, 0)
    text.train.rows(np.arange(3), length, 0)
    with pytest.raises(UserError, match=f"sequence_length is {length + 1}"):
        text.train.rows(np.arange(3), length + 1, 0)

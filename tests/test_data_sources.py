"""Where documents come from: compressed files, columns, data sets; each taken up again where it stopped."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import fails, sentences, write, write_jsonl, write_parquet

from keyshift import data
from keyshift.data.sources import Source


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
each_compression = pytest.mark.parametrize("suffix", COMPRESS)


def lines(documents: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, column: document}) + "\n" for document in documents).encode()


# Compressed files


@each_compression
def test_compressed_files_are_read_as_what_they_hold(tmp_path: Path, suffix: str) -> None:
    text = "\ufeff" + "\n\n".join(sentences(3000))  # longer than a document, and than a decompressor's buffer
    plain = [write(tmp_path / "plain/a.txt", text), write(tmp_path / "plain/b.jsonl", lines(sentences(2000)))]
    for file in plain:
        write(tmp_path / "packed" / f"{file.name}{suffix.upper()}", COMPRESS[suffix](file.read_bytes()))
    packed = data.find_files([tmp_path / "packed"])
    assert [file.name for file in packed] == [f"a.txt{suffix.upper()}", f"b.jsonl{suffix.upper()}"]
    assert list(data.read_documents(packed)) == list(data.read_documents(plain))


@each_compression
def test_several_compressed_streams_in_one_file(tmp_path: Path, suffix: str) -> None:
    """What parallel compressors write."""
    documents = sentences(400)
    parts = [lines(documents[:150]), lines(documents[150:])]
    file = write(tmp_path / f"a.jsonl{suffix}", b"".join(map(COMPRESS[suffix], parts)))
    assert list(data.read_documents([file])) == documents


@each_compression
def test_damaged_compressed_files_are_named(tmp_path: Path, suffix: str) -> None:
    content = COMPRESS[suffix](os.urandom(100_000).hex().encode())
    for damaged in (content[: len(content) // 2], content[:-3], content[:2], b"no such thing", b"\0" * 100):
        file = write(tmp_path / f"a.txt{suffix}", damaged)
        with fails(file, "damaged or cut off"):
            list(data.read_documents([file]))


def test_only_text_and_json_lines_are_compressed(tmp_path: Path) -> None:
    for name in ("a.parquet.gz", "a.tar.gz", "a.gz", "a.py.xz", "a.txt.gz.gz"):
        with fails(name, "unsupported suffix", ".zst"):
            data.find_files([write(tmp_path / name)])


def test_bytes_read_are_those_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl.gz", gzip.compress(lines(sentences(5000))))
    reading = data.FileSource([file]).read()
    seen = [reading.bytes_read for _ in reading]
    assert seen == sorted(seen)
    assert 0 < seen[0] <= seen[-1] <= file.stat().st_size == reading.bytes_read


# Columns


def test_another_column(tmp_path: Path) -> None:
    documents = sentences(20)
    write(tmp_path / "a.jsonl", lines(documents[:10], "content"))
    write_parquet(tmp_path / "b.parquet", {"text": ["no"] * 10, "content": documents[10:]})
    assert list(data.FileSource([tmp_path], column="content").read()) == documents
    with fails('"body"', "id, content"):
        list(data.FileSource([tmp_path / "a.jsonl"], column="body").read())
    with fails('"body"', "text, content"):
        list(data.FileSource([tmp_path / "b.parquet"], column="body").read())


# Data sets


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    for part in range(3):
        rows = [*sentences(40, seed=part), None, " \n", *sentences(30, seed=part + 10)]
        table = {"id": list(range(72)), "text": rows}
        write_parquet(folder / f"train-{part}.parquet", table, row_group_size=25)
    write_parquet(folder / "test-0.parquet", {"id": [1, 2], "text": ["one", "two"]})
    return folder


def expected() -> list[str]:
    return [text for part in range(3) for text in [*sentences(40, part), *sentences(30, part + 10)]]


def test_a_folder_of_a_data_set(dataset: Path) -> None:
    assert list(data.DatasetSource(str(dataset)).read()) == expected()
    assert list(data.DatasetSource(str(dataset), split="test").read()) == ["one", "two"]


def test_a_saved_data_set(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_dict({"id": [0] * 300, "text": sentences(300)})
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "several")
    assert list(data.DatasetSource(str(tmp_path / "one")).read()) == sentences(300)
    assert list(data.DatasetSource(str(tmp_path / "several"), split="test").read()) == sentences(300)[:5]
    with fails("'dev'", "train, test"):
        data.DatasetSource(str(tmp_path / "several"), split="dev").facts()
    check_taken_up(data.DatasetSource(str(tmp_path / "one")), sentences(300), [0, 1, 99, 299, 300])


def check_taken_up(source: Source, documents: list[str], places: list[int]) -> None:
    """Wherever the reading stops, a new one goes on from the position, also one that was taken up itself."""
    for place in places:
        reading = source.read()
        iterator = iter(reading)
        assert [next(iterator) for _ in range(place)] == documents[:place]
        position = json.loads(json.dumps(reading.position))
        again = source.read(position)
        assert again.bytes_read == reading.bytes_read
        begun = iter(again)
        middle = [text for _, text in zip(range(3), begun, strict=False)]
        rest = list(source.read(json.loads(json.dumps(again.position))))
        assert [*middle, *rest] == documents[place:]


def test_a_data_set_is_taken_up_anywhere(dataset: Path) -> None:
    check_taken_up(
        data.DatasetSource(str(dataset)), expected(), [0, 1, 25, 39, 40, 41, 69, 70, 71, 140, 209, 210]
    )


def test_a_data_set_that_keeps_no_state_is_read_again(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def none(self: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(datasets.IterableDataset, "state_dict", none)
    check_taken_up(data.DatasetSource(str(dataset)), expected(), [0, 1, 40, 71, 210])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["a", "b\n", " ", ""]), max_size=5), min_size=1, max_size=4), st.data()
)
def test_files_are_taken_up_anywhere(files: list[list[str]], draw: st.DataObject) -> None:
    """Blank documents and empty files in between do not matter."""
    documents = [text for file in files for text in file if text.strip()]
    if not documents:
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            write_jsonl(Path(folder, f"{number}.jsonl"), file)
        place = draw.draw(st.integers(0, len(documents)))
        check_taken_up(data.FileSource([folder]), documents, [place])


def test_preparing_a_data_set_is_taken_up(dataset: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    data.train_tokenizer(sentences(300), 400).save_pretrained(tokenizer)
    settings: dict[str, Any] = {"tokenizer": str(tokenizer), "shard_bytes": 2000, "validation_fraction": 0.2}
    source = data.DatasetSource(str(dataset))
    whole = data.prepare(source, tmp_path / "whole", **settings)
    loaded = data.load_tokenizer(tokenizer)
    decoded = [loaded.decode(tokens) for tokens in whole.train.documents()]
    assert decoded == [text for text in expected() if not data.in_validation(text, 0.2)]
    broken = tmp_path / ".store.partial"

    def interrupt(done: int, total: int) -> None:
        if len(list(broken.glob("records/*"))) == 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.preparing, "_PROGRESS_BYTES", 1)
        with pytest.raises(KeyboardInterrupt):
            data.prepare(source, tmp_path / "store", progress=interrupt, **settings)
    position = json.loads((broken / "records/3.json").read_text())["position"]
    assert position["state"] is not None
    reads: list[Any] = []
    read = data.DatasetSource.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.DatasetSource, "read", lambda self, at=None: reads.append(at) or read(self, at))  # type: ignore[func-returns-value]
        data.prepare(data.DatasetSource(str(dataset)), tmp_path / "store", **settings)
    assert reads == [position]
    for path in (tmp_path / "whole").glob("*.*"):
        assert path.read_bytes() == (tmp_path / "store" / path.name).read_bytes(), path
    os.utime(dataset / "train-1.parquet")  # changed: not the same data any more
    changed = data.prepare(data.DatasetSource(str(dataset)), tmp_path / "store", **settings)
    assert changed.summary() == whole.summary()
    assert (tmp_path / "store/meta.json").read_text() != (tmp_path / "whole/meta.json").read_text()


def test_data_sets_that_do_not_fit(dataset: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"column": "content"}, ["column 'content'", "id, text"]),
        ({"split": "dev"}, ["split dev", "train"]),
        ({"config": "en"}, ["config en"]),
        ({"name": str(tmp_path / "nowhere")}, ["nowhere"]),
    ]
    for changes, parts in cases:
        source = data.DatasetSource(**{"name": str(dataset), **changes})
        with fails(*parts):
            data.prepare(source, tmp_path / "store", tokenizer=None, vocab_size=300)
        assert not (tmp_path / "store").exists()
    with fails("column 'id'", "int values"):
        list(data.DatasetSource(str(dataset), column="id").read())


def test_without_the_library_the_error_names_it(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with fails("pip install 'keyshift[data]'"):
        data.DatasetSource(str(dataset)).facts()


@pytest.mark.parametrize("offline", ["0", "1"])
def test_an_unreachable_hub_says_how_to_work_offline(tmp_path: Path, offline: str) -> None:
    script = (  # retries of the hub's library wait shorter
        "import time; sleep = time.sleep; time.sleep = lambda seconds: sleep(seconds / 100)\n"
        "from keyshift import data; data.DatasetSource('HuggingFaceFW/fineweb-edu', 'sample-10BT').facts()"
    )
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("keyshift.errors.UserError: dataset 'HuggingFaceFW/fineweb-edu'")
    assert "cannot be reached" in last
    assert "HF_HUB_OFFLINE=1" in last
    assert "local folder" in last


def test_a_folder_with_a_card_has_its_configurations(tmp_path: Path) -> None:
    """As the hub lays them out, and ``hf download`` brings them."""
    card = "configs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*"
    write(tmp_path / "set/README.md", f"---\n{card}\n---\n")
    for name, documents in (("sample/10BT", sentences(30)), ("data", sentences(9, seed=1))):
        (tmp_path / "set" / name).mkdir(parents=True)
        write_parquet(tmp_path / "set" / name / "000.parquet", {"text": documents})
    source = data.DatasetSource(str(tmp_path / "set"), "sample-10BT")
    assert list(source.read()) == sentences(30)
    with fails("config sample-350BT"):
        data.DatasetSource(str(tmp_path / "set"), "sample-350BT").facts()


def test_a_data_set_that_was_fetched_before_is_read_offline(tmp_path: Path) -> None:
    """From the cache of the library; what is in it was made here, under the name of one on the hub."""
    (tmp_path / "name").mkdir()
    write_parquet(tmp_path / "name/train-0.parquet", {"text": sentences(50)})
    script = (
        "import datasets, os, pathlib; from keyshift import data\n"
        f"datasets.load_dataset({str(tmp_path / 'name')!r})\n"
        "cache = pathlib.Path(os.environ['HF_HOME'], 'datasets')\n"
        "(cache / 'name').rename(cache / 'org___name')\n"
        "print(*data.DatasetSource('org/name').read(), sep='\\n')"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.stdout.splitlines() == sentences(50), done.stderr

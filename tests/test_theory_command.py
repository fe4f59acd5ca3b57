"""``keyshift theory`` as a user meets it: what it prints and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import chromium_fixture, console_errors, prefer, requested_urls, resize  # noqa: F401
from commands import exit_code
from selenium import webdriver

from keyshift.theory import TheoryReport, command
from keyshift.theory.report.numbers import number
from keyshift.theory.results import Check


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of the command: its folder and what it printed."""
    directory = tmp_path_factory.mktemp("theory") / "out"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        assert exit_code(patch, "theory", "--out", str(directory)) == 0
    return directory, printed.getvalue()


def test_every_statement_is_printed_within_80_columns(written: tuple[Path, str]) -> None:
    directory, printed = written
    report = TheoryReport.model_validate_json((directory / "theory.json").read_text())
    *lines, last = printed.splitlines()
    assert last == f"report: {directory / 'theory.html'}"
    assert max(map(len, lines)) <= 80
    assert sum(line.rstrip().endswith(("holds", "corrected", "wrong")) for line in lines) == len(
        report.checks
    )
    for check in report.checks:
        assert number(check) in printed
        assert check.part in printed


def test_the_numbers_say_what_the_verdicts_say(written: tuple[Path, str]) -> None:
    report = TheoryReport.model_validate_json((written[0] / "theory.json").read_text())
    assert len({check.statement for check in report.checks}) == len(report.checks)
    exact = [
        check for check in report.checks if check.measured.startswith("largest") and check.verdict == "holds"
    ]
    assert len(exact) >= 6
    assert all(check.value < 1e-13 for check in exact)
    for check in report.checks:
        if check.measured.startswith("slope"):
            expected = -0.5 if "d^(-1/2)" in check.statement else -1
            assert check.value == pytest.approx(expected, abs=0.06)
    shares = [each.away for each in report.landscapes]
    assert shares == sorted(shares, reverse=True)
    assert [round(share, 3) for share in shares] == [0.313, 0.098, 0.011]


class References(HTMLParser):
    """Everything in a page that could be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]


def test_the_page_holds_everything(written: tuple[Path, str]) -> None:
    directory, _ = written
    page = (directory / "theory.html").read_text()
    references = References()
    references.feed(page)
    assert references.found
    assert all(reference.startswith("data:") for reference in references.found)
    assert "url(" not in page
    assert page.count("<img ") == 5 == page.count(' alt="')
    names = {path.stem for path in (directory / "figures").iterdir()}
    assert names == set(re.findall(r'id="figure-(\w+)"', page)) == {"copy", "limit", "flow", "scale", "start"}


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_the_page_opens_and_fits(
    written: tuple[Path, str], chromium: webdriver.Chrome, width: int, scheme: str
) -> None:
    prefer(chromium, scheme)
    resize(chromium, width)
    requested_urls(chromium)  # those of the browser's own first page
    chromium.get((written[0] / "theory.html").as_uri())
    assert console_errors(chromium) == []
    assert all(url.startswith(("file:", "data:")) for url in requested_urls(chromium))
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    drawn = "return [...document.images].every(image => image.complete && image.naturalWidth > 0)"
    assert chromium.execute_script(drawn)


def test_json_is_all_that_stdout_holds(
    written: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = TheoryReport.model_validate_json((written[0] / "theory.json").read_text())
    monkeypatch.setattr(command, "measure", lambda progress: report)
    monkeypatch.setattr(command, "write_theory", lambda report, directory: None)
    assert exit_code(monkeypatch, "theory", "--json", "--out", str(tmp_path)) == 0
    printed = capsys.readouterr()
    assert [Check(**row) for row in json.loads(printed.out)] == report.checks
    assert "theory.html" in printed.err


def test_a_folder_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert exit_code(monkeypatch, "theory", "--out", str(tmp_path / "file")) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: out={tmp_path / 'file'} cannot be written")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "error", "written"),
    [
        (0.0, None, "0"),
        (2.22e-16, None, "2.2e−16"),
        (-0.0571, None, "−0.0571"),
        (-0.5616, 0.0015, "−0.5616 ± 0.0015"),
        (0.16, 0.0007, "0.1600 ± 0.0007"),
        (1.17, 0.0, "1.17"),
        (25.0, 3.0, "25 ± 3"),
        (250.0, 12.0, "250 ± 12"),
    ],
)
def test_numbers_end_with_their_uncertainty(value: float, error: float | None, written: str) -> None:
    check = Check(part="", statement="", measured="", value=value, error=error, verdict="holds")
    assert number(check) == written

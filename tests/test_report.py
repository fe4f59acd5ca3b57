"""The report: its numbers by hand, its files, and its page in a real browser."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Literal

import matplotlib
import pytest
from browser import chromium_fixture, console_errors, prefer, requested_urls, resize  # noqa: F401
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reports import (
    at,
    divergence_report,
    fall,
    report,
    rise,
    run,
    score_report,
    shift_weights,
    steps_report,
    variant,
    width_report,
)
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.expected_conditions import alert_is_present

from keyshift.report import print_summary, summary_rows, write_report
from keyshift.report.figures.series import aligned, track_of
from keyshift.report.markdown import render_markdown
from keyshift.results import Point, Report, ShiftWeights

HOSTILE = "<script>alert(1)</script>"
ODD_NAMES = ("_x", "$a_b$ \\frac", "[red]名前[/red] 🙂", "n" * 200)


# --- reports to work with


def task_report() -> Report:
    """Four variants with three seeds; one run diverged, one variant never learns, one name is hostile."""
    seeds = range(3)
    speed = {"train_tokens_per_second": 41_234.0, "decode_ms_per_token": 0.412}
    blown = [*rise(2, 380, 0.999)[:8], Point(step=200, tokens=819_200, loss=1e9, accuracy=0.01)]
    two_layer = [run(seed, rise(seed, 380, 0.999), **speed) for seed in (0, 1)]
    lost = run(2, blown, status="diverged", message="loss is nan at step 212", steps=212)
    return report(
        "task",
        [
            variant(
                "1-layer GQA",
                [run(s, rise(s, 10_000, 0.25), **speed) for s in seeds],
                cache_bytes_per_token_measured=512.0,
            ),
            variant(
                "1-layer GQA + shift",
                [run(s, rise(s, 250, 1.0), shift_weights=shift_weights(s, 1, 2), **speed) for s in seeds],
                shift="kv",
                parameters=66_312,
                shift_parameters=8,
                cache_bytes_per_token_measured=512.0,
            ),
            variant(
                "1-layer GVA + shift",
                [run(s, rise(s, 160, 1.0), shift_weights=shift_weights(s, 1, 4), **speed) for s in seeds],
                cached=272,
                attention="gva",
                shift="kv",
                parameters=68_752,
                shift_parameters=16,
                cache_bytes_per_token_measured=272.0,
            ),
            variant(
                HOSTILE, [*two_layer, lost], 1024, parameters=115_712, cache_bytes_per_token_measured=1024.0
            ),
        ],
    )


def text_report() -> Report:
    """Three variants on text, two seeds."""
    floors = {"GQA": 3.93, "GQA + shift": 3.90, "GVA + shift": 3.94}
    variants = [
        variant(
            name,
            [
                run(s, fall(s, floor), shift_weights=shift_weights(s, 6, 4) if "shift" in name else [])
                for s in range(2)
            ],
            cached=1632 if "GVA" in name else 3072,
            attention="gva" if "GVA" in name else "gqa",
            shift="kv" if "shift" in name else "none",
            parameters=2_412_544,
            cache_bytes_per_token_measured=1632.0 if "GVA" in name else 3072.0,
        )
        for name, floor in floors.items()
    ]
    return report("text", variants, title="Six megabytes of text")


def weights(of: Literal["key", "value", "query"], head: list[float]) -> ShiftWeights:
    return ShiftWeights(layer=1, of=of, weights=[head])


PARTIAL = {
    "no variants": report("task", [], complete=False),
    "no runs": report("task", [variant("a", [])], complete=False),
    "pending": report("text", [variant("a", [run(0, [], status="pending")])], complete=False),
    "one point": report("task", [variant("a", [run(0, [at(0, 0.1)])])]),
    "interrupted": report(
        "task", [variant("a", [run(0, [at(0, 0.1), at(10, 0.5)], status="interrupted")])], complete=False
    ),
    "all diverged": report("text", [variant("a", [run(0, [], status="diverged", message="loss is nan")])]),
    "not finite": report("task", [variant("a", [run(0, [at(0, 0.1), at(5, math.nan, math.inf)])])]),
    "no common step": report("task", [variant("a", [run(0, [at(1, 0.1)]), run(1, [at(2, 0.2)])])]),
    "no cache at all": report("task", [variant("a", [run(0, [at(9, 1.0)])], 0)]),
    "odd names": report("task", [variant(n, [run(0, [at(9, 1.0)])]) for n in ODD_NAMES]),
    "only keys shifted": report(
        "text",
        [
            variant("a", [run(0, [], shift_weights=[weights("key", [0.2, 0.3, 0.5])])]),
            variant("b", [run(0, [], shift_weights=[weights("query", [1.0, 0.0])])]),
        ],
    ),
}
SHOWN = {
    "task": task_report(),
    "text": text_report(),
    "widths": width_report(),
    "scores": score_report(),
    "divergence": divergence_report("loss", "diverged"),
    "steps": steps_report(),
    **PARTIAL,
}


# --- numbers


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(0.9999, [0, 0, 0])
@example(0.1, [0, 0, 0])
@given(st.floats(0, 1), st.lists(st.sampled_from([0, 1e-16, 1e-12, 0.1]), min_size=1, max_size=5))
def test_equal_and_nearly_equal_seeds_can_be_drawn(
    tmp_path: Path, accuracy: float, offsets: list[float]
) -> None:
    """The mean of equal floats may round to just outside them, which an error bar does not take."""
    ends = [min(1.0, accuracy + offset) for offset in offsets]
    runs = [run(i, [Point(step=1, tokens=1, loss=1, accuracy=end)]) for i, end in enumerate(ends)]
    made = report("task", [variant("a", runs, cache_bytes_per_token_measured=512)])
    (row,) = summary_rows(made)
    assert row["final_accuracy"]["min"] <= row["final_accuracy"]["mean"] <= row["final_accuracy"]["max"]
    write_report(made, tmp_path)


def test_summary_rows_match_numbers_computed_by_hand() -> None:
    base = variant("base", [run(s, [at(50, 0.2, 2.0), at(100, 0.3, 1.5)]) for s in (0, 1)], 400)
    shifted = variant(
        "shifted",
        [
            run(0, [at(50, 0.95), at(100, 1.0, 0.1)], decode_ms_per_token=1.0, train_tokens_per_second=10.0),
            run(1, [at(50, 0.5), at(100, 0.9, 0.3)], decode_ms_per_token=3.0, train_tokens_per_second=30.0),
            run(2, [at(50, 0.1)], status="diverged", decode_ms_per_token=2.0),
        ],
        100,
        shift="kv",
        shift_parameters=4,
    )
    first, second = summary_rows(report("task", [base, shifted]))
    never = {"median": None, "min": None, "max": None, "reached": 0, "of": 2}
    assert first["steps_to_90"] == first["steps_to_99"] == never
    assert first["status"] == "finished"
    assert first["cache_ratio"] == 1.0
    assert second["steps_to_90"] == {"median": 100, "min": 50, "max": 100, "reached": 2, "of": 3}
    assert second["steps_to_99"] == {"median": None, "min": 100, "max": 100, "reached": 1, "of": 3}
    assert second["final_loss"]["mean"] == pytest.approx(0.2)
    assert second["final_loss"]["std"] == pytest.approx(math.sqrt(0.02))
    assert second["final_accuracy"]["mean"] == pytest.approx(0.95)
    assert (second["final_accuracy"]["min"], second["final_accuracy"]["max"]) == (0.9, 1.0)
    assert (second["seeds_finished"], second["seeds_total"]) == (2, 3)
    assert (second["cache_ratio"], second["cache_ratio_to"]) == (0.25, "base")
    assert second["cache_ratio_measured"] is False
    assert (second["decode_ms_per_token"], second["train_tokens_per_second"]) == (2.0, 20.0)
    assert second["status"] == "2 finished, 1 diverged"
    assert second["bits_per_byte"] is None
    json.dumps([first, second], allow_nan=False)


def test_ratio_uses_measured_bytes_where_both_variants_have_them() -> None:
    variants = [
        variant("gva", [], 200, attention="gva", cache_bytes_per_token_measured=220.0),
        variant("gqa", [], 400, cache_bytes_per_token_measured=440.0),
        variant("mla", [], 100, attention="mla"),
    ]
    rows = summary_rows(report("text", variants))
    assert [(row["cache_ratio"], row["cache_ratio_measured"]) for row in rows] == [
        (0.5, True),
        (1.0, True),
        (0.25, False),
    ]


def test_without_plain_gqa_there_is_no_ratio() -> None:
    (row,) = summary_rows(report("text", [variant("shifted", [], shift="k")]))
    assert row["cache_ratio"] is None
    assert row["cache_ratio_to"] is None


def test_runs_under_way_count_for_steps_only_once_they_got_there() -> None:
    runs = [run(0, [at(10, 0.5), at(20, 0.95)]), run(1, [at(10, 0.5)], status="interrupted")]
    (row,) = summary_rows(report("task", [variant("a", runs)], complete=False))
    assert row["steps_to_90"] == {"median": 20, "min": 20, "max": 20, "reached": 1, "of": 1}


# --- files


@pytest.mark.parametrize("case", PARTIAL)
def test_partial_reports_are_written_without_a_warning(case: str, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(PARTIAL[case], tmp_path)
        print_summary(PARTIAL[case], console)
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_report_json_reads_back(tmp_path: Path) -> None:
    write_report(text_report(), tmp_path)
    assert Report.model_validate_json((tmp_path / "report.json").read_bytes()) == text_report()


def test_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_report(task_report(), tmp_path / name)
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*")]
    assert {str(file) for file in files} == {
        "report.json",
        "report.html",
        "report.md",
        *(f"figures/{name}.png" for name in ("accuracy", "loss", "cache", "shift")),
    }
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_drawing_ignores_and_keeps_the_users_matplotlib_settings(tmp_path: Path) -> None:
    write_report(text_report(), tmp_path / "a")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        write_report(text_report(), tmp_path / "b")
        assert dict(matplotlib.rcParams) == before
    page = "report.html"
    assert (tmp_path / "a" / page).read_bytes() == (tmp_path / "b" / page).read_bytes()


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(PARTIAL["one point"], tmp_path)
    before = (tmp_path / "report.json").read_bytes()

    def fail(source: Path, target: Path) -> None:
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk gone"):
        write_report(text_report(), tmp_path)
    assert (tmp_path / "report.json").read_bytes() == before
    assert not list(tmp_path.rglob("*.tmp"))


def test_figures_of_an_earlier_report_do_not_stay(tmp_path: Path) -> None:
    write_report(task_report(), tmp_path)
    write_report(PARTIAL["pending"], tmp_path)
    assert not list((tmp_path / "figures").iterdir())


def test_value_heads_are_shared_by_the_key_heads_of_their_group(tmp_path: Path) -> None:
    learned = [
        ShiftWeights(layer=0, of="key", weights=[[0.1, 0.9], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]]),
        ShiftWeights(layer=0, of="value", weights=[[1.0, 0.0], [0.5, 0.5]]),
    ]
    write_report(report("task", [variant("a", [run(7, [], shift_weights=learned)])]), tmp_path)
    page = (tmp_path / "report.html").read_text()
    lines = re.findall(r"<tr>((?:<td>[^<]*</td>)+)</tr>", page)
    assert [re.findall(r"<td>(.*?)</td>", line) for line in lines] == [
        ["7", "0", "0", "0.100", "0.900", "1.000", "0.000"],
        ["7", "0", "1", "0.200", "0.800", "1.000", "0.000"],
        ["7", "0", "2", "0.300", "0.700", "0.500", "0.500"],
        ["7", "0", "3", "0.400", "0.600", "0.500", "0.500"],
    ]


def test_a_report_of_a_grid_has_its_figures(tmp_path: Path) -> None:
    write_report(width_report(), tmp_path / "widths")
    write_report(score_report(), tmp_path / "scores")
    drawn = {
        folder: {path.stem for path in (tmp_path / folder / "figures").iterdir()}
        for folder in ("widths", "scores")
    }
    assert drawn["widths"] == {"grid", "difference-accuracy", "accuracy", "loss"}
    assert drawn["scores"] == {"errors", "scores", "accuracy", "loss"}


def test_a_run_that_was_done_early_keeps_its_last_value() -> None:
    early, late, cut = (
        run(seed, rise(seed, 50, 1.0, steps=steps)) for seed, steps in enumerate((50, 75, 75))
    )
    cut = cut.model_copy(update={"status": "interrupted", "curve": cut.curve[:2]})
    tracks = [track for each in (early, late) if (track := track_of(each, "accuracy"))]
    rows = aligned(tracks)
    assert list(rows) == [0, 25, 50, 75]
    assert rows[75] == [early.curve[-1].accuracy, late.curve[-1].accuracy]
    (stopped,) = [track for each in (cut,) if (track := track_of(each, "accuracy"))]
    assert list(aligned([*tracks, stopped])) == [0, 25]


def test_markdown_holds_the_report_and_nothing_that_markdown_would_read() -> None:
    text = render_markdown(width_report())
    assert "> At \\<b\\>hidden size 8\\</b\\> one layer with KV shift learns." in text
    assert "- 2 layers, 8, seed 1: failed after 40 steps (killed by signal 9)" in text
    assert "- 2 layers, 64, seed 2: diverged after 30 steps (loss is nan)" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert [len(lines) - 2 for lines in tables] == [6, 8]
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert render_markdown(task_report()).count("\\<script\\>") == 2
    assert "## Scores" in render_markdown(score_report())


@pytest.mark.parametrize("case", SHOWN)
def test_markdown_of_any_report_is_the_same_each_time(case: str) -> None:
    text = render_markdown(SHOWN[case])
    assert text == render_markdown(Report.model_validate_json(SHOWN[case].model_dump_json()))
    assert text.endswith("\n")


def test_markdown_links_the_figures(tmp_path: Path) -> None:
    write_report(width_report(), tmp_path)
    links = re.findall(r"\]\((.+?)\)", (tmp_path / "report.md").read_text())
    assert sorted(links) == sorted(f"figures/{path.name}" for path in (tmp_path / "figures").iterdir())


def test_importing_the_report_loads_no_drawing_library() -> None:
    code = "import sys, keyshift.report; sys.exit(bool({'matplotlib', 'jinja2', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the terminal


@pytest.mark.parametrize("kind", SHOWN)
def test_summary_fits_80_columns(kind: str) -> None:
    output = io.StringIO()
    print_summary(SHOWN[kind], Console(file=output, width=80))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not re.search(r"\S…", output.getvalue())  # nothing is cut


def test_summary_shows_the_columns_of_its_kind() -> None:
    tables = {}
    for shown in (task_report(), text_report()):
        output = io.StringIO()
        print_summary(shown, Console(file=output, width=80))
        tables[shown.kind] = output.getvalue()
    assert "→99%" in tables["task"]
    assert "Bits/B" not in tables["task"]
    assert "Bits/B" in tables["text"]
    assert "→99%" not in tables["text"]
    assert "ms/tok" not in tables["text"]
    assert "tok/s" in tables["task"]
    assert "diverged after 212 steps (loss is nan at step 212)" in " ".join(tables["task"].split())


# --- the page


def open_page(driver: webdriver.Chrome, shown: Report, directory: Path) -> None:
    write_report(shown, directory)
    console_errors(driver)
    requested_urls(driver)
    driver.get((directory / "report.html").as_uri())


def test_page_in_a_browser(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    resize(chromium, 1200)
    open_page(chromium, task_report(), tmp_path)

    figures = chromium.find_elements(By.CSS_SELECTOR, "figure img")
    assert len(figures) == 4
    for figure in figures:
        assert figure.rect["width"] > 500
        assert figure.rect["height"] > 200
        assert chromium.execute_script("return arguments[0].naturalWidth", figure) > 0
        assert len(figure.get_attribute("alt")) > 40
    names = chromium.find_elements(By.CSS_SELECTOR, ".results tbody th")
    assert [name.text for name in names] == [v.name for v in task_report().variants]
    assert "loss is nan at step 212" in chromium.find_element(By.CSS_SELECTOR, ".banner").text
    assert not alert_is_present()(chromium)
    assert not chromium.find_elements(By.CSS_SELECTOR, "script")
    assert console_errors(chromium) == []
    urls = requested_urls(chromium)
    assert urls
    assert all(url.startswith(("file:", "data:", "about:")) for url in urls)


def test_page_says_what_was_measured(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, task_report(), tmp_path)
    sentences = [item.text for item in chromium.find_elements(By.CSS_SELECTOR, ".findings li")]
    plain, _, gva, hostile = sentences
    assert plain.startswith(
        "1-layer GQA stayed below 90% held-out accuracy in 3 of 3 seeds, and ended at 25."
    )
    assert "reached 99% held-out accuracy in 3 of 3 seeds, median step " in gva
    assert gva.endswith("with 0.53 of the measured cache of 1-layer GQA.")
    assert hostile.startswith(f"{HOSTILE} reached 99% held-out accuracy in 2 of 3 seeds, at steps ")


def test_page_of_a_grid(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    resize(chromium, 1200)
    open_page(chromium, width_report(), tmp_path)
    claim = chromium.find_element(By.CSS_SELECTOR, "header .claim").text
    assert claim.splitlines()[-1] == "At <b>hidden size 8</b> one layer with KV shift learns."
    banner = chromium.find_element(By.CSS_SELECTOR, ".banner").text
    assert "Runs lost: 1 diverged, 1 failed." in banner
    assert "2 layers, 8, seed 1: failed after 40 steps (killed by signal 9)" in banner
    rows = [row.text for row in chromium.find_elements(By.CSS_SELECTOR, ".differences tbody tr")]
    assert rows[0] == "1 layer + KV shift vs 2 layers, accuracy"
    assert [row.split("\n")[0].split(" points")[0].rsplit(" ", 1)[0] for row in rows[1:5]] == [
        "hidden size 8",
        "hidden size 16",
        "hidden size 64",
        "pooled over 3",
    ]
    assert "1 left out: failed" in rows[1]
    assert "at least" in next(row for row in rows[6:] if row.startswith("hidden size 16"))
    swatches = chromium.find_elements(By.CSS_SELECTOR, ".results .swatch")
    assert len({swatch.value_of_css_property("background-color") for swatch in swatches}) == 2


def test_page_shows_scores(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(chromium, score_report(), tmp_path)
    table = chromium.find_element(By.CSS_SELECTOR, "[aria-label=Scores] table").text
    assert table.splitlines()[0] == "Variant k=1 k=2 k=4 k=8 test lenient test strict"
    assert "97.5%" in table


@pytest.mark.parametrize("kind", ["task", "text", "widths", "scores", "divergence", "odd names", "pending"])
@pytest.mark.parametrize("width", [400, 1200])
def test_page_never_scrolls_sideways(
    chromium: webdriver.Chrome, tmp_path: Path, kind: str, width: int
) -> None:
    resize(chromium, width)
    open_page(chromium, SHOWN[kind], tmp_path)
    for details in chromium.find_elements(By.CSS_SELECTOR, "summary"):
        details.click()
    assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
    assert console_errors(chromium) == []


def test_figures_stay_on_white_in_the_dark(chromium: webdriver.Chrome, tmp_path: Path) -> None:
    prefer(chromium, "dark")
    open_page(chromium, text_report(), tmp_path)
    colour = "return getComputedStyle(document.querySelector(arguments[0])).backgroundColor"
    page, card = (chromium.execute_script(colour, selector) for selector in ("body", ".card"))
    prefer(chromium, "light")
    assert page == "rgb(20, 23, 26)"
    assert card == "rgb(255, 255, 255)"

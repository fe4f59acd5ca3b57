"""Pages of measured results say what their JSON says; the script that writes them."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from reports import divergence_report, grid, run, score_report, width_report

from keyshift.papers import Experiment, experiments
from keyshift.report import write_report
from keyshift.report.markdown import render_markdown
from keyshift.report.paired import differences
from keyshift.results import Point, Report, ShiftWeights

ROOT = Path(__file__).resolve().parents[1]
KEPT = sorted((ROOT / "docs" / "results").glob("*.json"))
LARGEST_JSON, LARGEST_IMAGE = 250_000, 60_000


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "results_pages.py"))


def measured(page: Path, name: str | None = None) -> str:
    """What stands between the markers of a page."""
    pattern = f"<!-- measured: {name or page.stem} -->\\n(.*?)<!-- /measured -->"
    (block,) = re.findall(pattern, page.read_text(), re.DOTALL)
    return str(block)


def check(kept: Path) -> None:
    """The text is the JSON's, but for the figures, whose files are there and small."""
    assert kept.stat().st_size < LARGEST_JSON
    block = measured(kept.with_suffix(".md"))
    text, _, figures = block.partition("\n## Figures\n")
    report = Report.model_validate_json(kept.read_text())
    title, whole = render_markdown(report).split("\n\n", 1)
    assert text.rstrip() == whole.rstrip()
    assert kept.with_suffix(".md").read_text().count(f"{title}\n") == 1
    for link in re.findall(r"^!\[.*\]\((.+)\)$", figures, re.MULTILINE):
        assert link.startswith(f"images/{kept.stem}-")
        assert 0 < (kept.parent / link).stat().st_size < LARGEST_IMAGE


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.stem)
def test_page_says_what_its_json_says(kept: Path) -> None:
    check(kept)


def test_the_table_of_adoption_is_its_jsons() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "adoption.py"))
    losses = json.loads((ROOT / "docs" / "results" / "adopt" / "losses.json").read_text())
    assert [row["name"] for row in losses] == [row.name for row in script["ROWS"]]
    assert measured(ROOT / "docs" / "results" / "adopt.md") == script["rendered"](losses) + "\n"


@pytest.mark.parametrize("experiment", experiments(), ids=lambda each: each.recipe)
def test_every_experiment_has_a_page_that_begins_with_its_verdict(experiment: Experiment) -> None:
    assert experiment.verdict is not None
    name = Path(experiment.recipe).name
    page = " ".join((ROOT / "docs" / "results" / f"{name}.md").read_text().split())
    assert f"**{experiment.verdict}**" in page.partition("<!-- measured")[0]


def test_the_index_is_made_of_claims_and_verdicts(script: dict[str, Any], tmp_path: Path) -> None:
    index = ROOT / "docs" / "results" / "README.md"
    for page in index.parent.glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text())
    script["write_index"](tmp_path)
    assert (tmp_path / "README.md").read_text() == index.read_text()
    for experiment in experiments():
        assert f"[{Path(experiment.recipe).name}](" in measured(index, "index")


def test_page_is_made_and_written_anew_between_its_markers(script: dict[str, Any], tmp_path: Path) -> None:
    write_report(width_report(), tmp_path / "run")
    results = tmp_path / "results"
    script["main"](["add", str(tmp_path / "run"), "widths"], results)
    kept, page = results / "widths.json", results / "widths.md"
    check(kept)
    whole = page.read_text()
    (results / "images" / "widths-loss.png").unlink()
    outdated = whole.replace("Results", "Outdated").replace("<!-- measured", "Before.\n\n<!-- measured")
    page.write_text(f"{outdated}\nAfter.\n")
    script["main"]([], results)
    check(kept)
    text = page.read_text()
    assert text.startswith("# ")
    assert "\n\nBefore.\n\n<!-- measured" in text
    assert text.endswith("<!-- /measured -->\n\nAfter.\n")
    assert "widths-grid.png" in text
    assert "widths-loss.png" not in text


def test_figures_can_be_chosen(script: dict[str, Any], tmp_path: Path) -> None:
    write_report(width_report(), tmp_path / "run")
    script["main"](["add", str(tmp_path / "run"), "widths", "grid"], tmp_path)
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["widths-grid.png"]
    with pytest.raises(SystemExit):
        script["main"](["add", str(tmp_path / "run"), "widths", "gird"], tmp_path)


def test_a_thinned_report_has_few_digits_and_the_same_shape(script: dict[str, Any]) -> None:
    report = width_report()
    whole = report.variants[0].runs[0]
    whole.train_loss = [(1, 2.0)]
    whole.curve[0].loss = whole.curve[-1].loss = 1.23456789
    whole.curve[0].accuracy = 0.98999999
    whole.shift_weights = [ShiftWeights(layer=0, of="key", weights=[[0.123456, 0.876544]])]
    thinned = script["thin"](report)
    first = thinned.variants[0].runs[0]
    assert first.train_loss == []
    assert (first.curve[0].loss, first.curve[0].accuracy) == (1.2346, 0.98999)
    assert first.curve[-1] == whole.curve[-1]
    assert first.shift_weights[0].weights == [[0.123, 0.877]]
    assert [len(r.curve) for v in thinned.variants for r in v.runs] == [
        len(r.curve) for v in report.variants for r in v.runs
    ]
    small = thinned.model_dump_json(exclude_defaults=True)
    assert Report.model_validate_json(small) == thinned


NEAR = st.sampled_from([0.9, 0.99]).flatmap(
    lambda level: st.one_of(
        st.floats(level - 2e-5, level + 2e-5),
        st.integers(-3, 3).map(lambda steps: level + steps * math.ulp(level)),
        st.sampled_from([level - 4e-6, level - 5e-6, level - 6e-6]),
    )
)
ACCURACIES = st.lists(st.one_of(NEAR, st.floats(0, 1)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([[0.989996, 0.5]] * 4, [1.0, 2.0], 0.99)
@given(
    st.lists(ACCURACIES, min_size=4, max_size=4),
    st.lists(st.floats(0.01, 20), min_size=2, max_size=5),
    st.sampled_from([None, 0.9, 0.99]),
)
def test_tables_of_a_thinned_report_are_those_of_the_whole_one(
    script: dict[str, Any], accuracies: list[list[float]], losses: list[float], until: float | None
) -> None:
    """Whichever side of a threshold an accuracy or a loss is on, it stays there."""
    losses = [*losses, math.log(64), math.nextafter(math.log(64), 9)]
    curves = [
        [
            Point(step=25 * i, tokens=i, loss=losses[(i + n) % len(losses)], accuracy=accuracy)
            for i, accuracy in enumerate(curve, 1)
        ]
        for n, curve in enumerate(accuracies)
    ]
    cells = {(name,): [run(s, curves[2 * i + s]) for s in range(2)] for i, name in enumerate(("a", "b"))}
    metrics = ("accuracy", "loss", "steps_to_99", "diverged")
    asked = [{"of": "a", "against": "b", "metric": metric} for metric in metrics]
    recipe = {"training": {"until_accuracy": until, "steps": 200}}
    report = grid("task", cells, ["variant"], comparisons=asked, recipe=recipe, data={"vocab_size": 64})
    thinned = script["thin"](report)
    assert differences(thinned) == differences(report)
    assert render_markdown(thinned) == render_markdown(report)
    for level in (0.9, 0.99):
        assert [r.steps_to(level) for v in thinned.variants for r in v.runs] == [
            r.steps_to(level) for v in report.variants for r in v.runs
        ]


@pytest.mark.parametrize("report", [width_report(), score_report(), divergence_report("loss", "diverged")])
def test_the_text_of_a_thinned_report_is_that_of_the_whole_one(
    script: dict[str, Any], report: Report
) -> None:
    assert render_markdown(script["thin"](report)) == render_markdown(report)

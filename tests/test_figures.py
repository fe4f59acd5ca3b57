"""What figures show of runs that never got there, were lost, or ended early; their words say the same."""

from __future__ import annotations

import re

import pytest
from matplotlib import style
from reports import at, divergence_report, fall, grid, run, steps_report, width_report
from reports import report as plain
from reports import variant as row_of

from keyshift.report import summary_rows
from keyshift.report.figures import STYLE, Picture, draw_figures
from keyshift.report.figures.grid import draw_grid
from keyshift.results import Report, RunResult


def drawn(report: Report, name: str) -> Picture:
    (picture,) = [picture for picture in draw_figures(report) if picture.name == name]
    return picture


def told(picture: Picture) -> dict[str, str]:
    """What the alternative text says of every line at every number: "2 layers at 8": "never (0 of 5)"."""
    lines = picture.alt.removesuffix(".").split(". ", 2)[2].split("; ")
    values = {}
    for line in lines:
        name, _, spots = line.partition(": ")
        for text, place, remark in re.findall(r"([^ ]+) at ([^ ]+?)((?: \([^)]*\))?)(?:, |$)", spots):
            values[f"{name} at {place}"] = text + remark
    return values


# --- runs that never got there


def test_a_line_of_steps_goes_through_the_medians_of_the_table() -> None:
    report = steps_report()
    values = told(drawn(report, "grid"))
    assert len(values) == len(report.variants)
    for variant, row in zip(report.variants, summary_rows(report), strict=True):
        text = values[f"{variant.labels['variant']} at {variant.labels['hidden size']}"]
        steps = row["steps_to_99"]
        median = "never" if steps["median"] is None else f"{steps['median']:,g}"
        assert text.partition(" ")[0] == median
        assert (f"{steps['reached']} of {steps['of']}" in text) == (steps["reached"] < steps["of"])


def test_runs_that_never_got_there_are_no_values() -> None:
    """However long they were trained, the line is the same; the triangles alone move."""
    figure = drawn(steps_report(), "grid")
    longer = steps_report()
    for variant in longer.variants:
        for each in variant.runs:
            if each.status == "finished" and each.steps_to(0.99) is None:
                each.steps = 5000
    assert told(figure) == told(drawn(longer, "grid"))
    assert figure.png != drawn(longer, "grid").png
    assert "n runs never reached 99% in 1,000 steps." in figure.caption
    assert "n runs never reached 99% in 5,000 steps." in drawn(longer, "grid").caption


def test_a_grid_of_steps_without_such_runs_speaks_of_none() -> None:
    report = steps_report()
    report.variants = [v for v in report.variants if v.name == "1 layer + KV shift, 32"] * 2
    report.variants[1] = report.variants[1].model_copy(
        update={"labels": {"variant": "1 layer + KV shift", "hidden size": "64"}}
    )
    picture = drawn(report, "grid")
    assert picture.caption == "One dot per seed; the line goes through their medians."
    assert set(told(picture).values()) == {"150"}


# --- runs that were lost


@pytest.mark.parametrize(
    ("report", "lost"),
    [
        (steps_report(), {"2 layers at 32": 1, "1 layer + KV shift at 16": 1}),
        (width_report(), {"2 layers at 8": 1, "2 layers at 64": 1}),
        (
            divergence_report("loss"),
            {f"vanilla at {x}": 1 for x in ("0.01", "0.1", "1")}
            | {f"KV shift at {x}": 1 for x in ("0.1", "1")},
        ),
        (divergence_report("diverged"), {}),
    ],
)
def test_lost_runs_are_said_to_be_lost(report: Report, lost: dict[str, int]) -> None:
    picture = drawn(report, "grid")
    found = {
        place: int(n[1]) for place, text in told(picture).items() if (n := re.search(r"(\d+) lost", text))
    }
    assert found == lost
    assert ("above the frame" in picture.caption) == bool(lost)


@pytest.mark.parametrize("report", [steps_report(), divergence_report("loss")])
def test_a_variant_of_which_all_runs_were_lost_is_shown(report: Report) -> None:
    first = report.variants[0].labels["variant"]
    for variant in report.variants:
        if variant.labels["variant"] == first:
            variant.runs = [run(seed, [], status="failed") for seed in range(5)]
    values = told(drawn(report, "grid"))
    assert [text for place, text in values.items() if place.startswith(first)] == (
        ["nothing (5 lost)"] * (len(values) // 2)
    )


def test_a_grid_in_which_all_runs_were_lost_is_not_drawn() -> None:
    cells = {("a", x): [run(0, [], status="diverged")] for x in ("1", "2")}
    with style.context(STYLE):
        assert draw_grid(grid("text", cells, ["variant", "rate"])) is None


def test_a_grid_of_divergence_shows_the_shares_of_the_table() -> None:
    report = divergence_report("diverged")
    values = told(drawn(report, "grid"))
    for variant, row in zip(report.variants, summary_rows(report), strict=True):
        share = row["diverged"]["runs"] / row["diverged"]["of"]
        assert (
            values[f"{variant.labels['variant']} at {variant.labels['learning rate']}"]
            == f"{100 * share:.1f}%"
        )


# --- runs that end early


def stopped(top: float) -> Report:
    """Runs that end once they are above 99%, at ``top``, at two widths; one variant takes longer."""
    cells = {
        (name, width): [
            run(seed, [at(step, 0.3 + 0.001 * step) for step in range(0, late, 25)] + [at(late, top)])
            for seed in range(2)
        ]
        for name, late in (("shift", 100), ("plain", 200))
        for width in ("8", "16")
    }
    asked = [{"of": "shift", "against": "plain", "metric": "accuracy"}]
    recipe = {"training": {"until_accuracy": 0.99, "steps": 500}}
    return grid("task", cells, ["variant", "width"], comparisons=asked, recipe=recipe)


def test_accuracies_above_the_end_of_runs_count_as_it_where_runs_are_compared() -> None:
    for name in ("grid", "difference-accuracy"):
        first, second = drawn(stopped(0.991), name), drawn(stopped(0.9999), name)
        assert first == second
        assert first.caption.endswith("Runs end at 99% and count as 99%.")
    assert told(drawn(stopped(0.9999), "grid"))["shift at 8"] == "99.00%"


def test_curves_stay_as_they_were_measured() -> None:
    assert "99.99% at step 100" in drawn(stopped(0.9999), "accuracy").alt


# --- heads probed during training


def probed(seed: int, step: int, **fields: object) -> RunResult:
    """A run whose best head becomes an induction head at ``step``."""
    scores = [(at_step, 0.02 if at_step < step else 0.9 + seed / 100) for at_step in range(0, 101, 20)]
    return run(seed, fall(seed, 3.0, steps=100, every=20), induction=scores, **fields)


def test_induction_scores_are_drawn_where_heads_were_probed() -> None:
    variants = [
        row_of("GQA", [run(0, fall(0, 3.0))]),
        row_of("GVA + shift", [probed(0, 40), probed(1, 60)]),
    ]
    figure = drawn(plain("text", variants), "induction")
    assert figure.alt.startswith("Line chart of induction score of the best head against training steps.")
    assert "GVA + shift: 90.5% at step 100" in figure.alt
    assert "GQA:" not in figure.alt
    never = plain("text", [row_of("GQA", [run(0, fall(0, 3.0))])])
    assert "induction" not in [picture.name for picture in draw_figures(never)]

"""Differences paired by seed: against scipy, by hand, by simulation, and where runs are missing."""

from __future__ import annotations

import io
import json
import math
import tomllib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import (
    at,
    divergence_report,
    ended,
    grid,
    learner,
    run,
    score_report,
    steps_report,
    variant,
    width_report,
)
from rich.console import Console
from scipy import stats

from keyshift.recipe import build_task, builtin_recipes, load_recipe
from keyshift.report import print_summary, summary_rows
from keyshift.report.labels import settings_of
from keyshift.report.markdown import render_markdown
from keyshift.report.outcomes import final_value
from keyshift.report.paired import Difference, differences, interval
from keyshift.report.tables import difference_lines, where
from keyshift.results import Report, RunResult

FIRST = [3.11, 3.05, 3.20, 3.02]
SECOND = [3.18, 3.16, 3.22, 3.15]
COMPARED = {"of": "shift", "against": "plain"}


def losses(values: list[float]) -> list[RunResult]:
    return [ended(seed, value, accuracy=value / 4) for seed, value in enumerate(values)]


def two(of: list[RunResult], against: list[RunResult], metric: str = "loss") -> Difference:
    """The difference between two variants without other axes."""
    cells = {("shift",): of, ("plain",): against}
    (found,) = differences(grid("task", cells, ["variant"], comparisons=[{**COMPARED, "metric": metric}]))
    return found


def steps(of: list[int | None], against: list[int | None]) -> Difference:
    sides = ([learner(seed, reached) for seed, reached in enumerate(side)] for side in (of, against))
    return two(*sides, metric="steps_to_99")


def by_width() -> Report:
    cells = {
        ("shift", "8"): losses(FIRST),
        ("shift", "16"): losses([loss - 0.5 for loss in SECOND]),
        ("plain", "8"): losses(SECOND),
        ("plain", "16"): losses(FIRST),
    }
    asked = [COMPARED, {"of": "16", "against": "8", "axis": "width"}]
    return grid("text", cells, ["variant", "width"], comparisons=asked)


def assert_as_scipy(found: Difference, first: list[float], second: list[float]) -> None:
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(first) - np.mean(second))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.pairs == len(first)


# --- numbers


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_mean_and_interval_are_scipys(metric: str) -> None:
    scale = 1 if metric == "loss" else 4
    found = two(losses(FIRST), losses(SECOND), metric)
    assert_as_scipy(found, [x / scale for x in FIRST], [x / scale for x in SECOND])
    assert found.left_out == {}


def test_pooled_seeds_count_once() -> None:
    small, large, pooled, *_ = differences(by_width())
    assert_as_scipy(small, FIRST, SECOND)
    assert_as_scipy(large, [loss - 0.5 for loss in SECOND], FIRST)
    means = [((a - b) + (b - 0.5 - a)) / 2 for a, b in zip(FIRST, SECOND, strict=True)]
    assert pooled.pooled
    assert (pooled.mean, pooled.pairs, pooled.cells) == (pytest.approx(np.mean(means)), 4, 2)
    assert (pooled.low, pooled.high) == (None, None)  # per seed the cells cancel


def test_another_axis_is_compared_within_each_variant() -> None:
    *_, shift, plain, pooled = differences(by_width())
    assert (shift.where, plain.where, pooled.where) == ({"variant": "shift"}, {"variant": "plain"}, {})
    assert_as_scipy(plain, FIRST, SECOND)


def test_scores_are_compared_by_name() -> None:
    errors, strict = differences(score_report())
    assert errors.mean == pytest.approx(0.64)
    assert strict.mean == pytest.approx(0.08)


def test_intervals_of_the_mean_hold_in_95_of_100_draws() -> None:
    draws = np.random.default_rng(0).normal(0.3, 2.0, size=(4000, 3))
    ends = [interval(draw.tolist()) for draw in draws]
    covered = np.mean([low <= 0.3 <= high for _, low, high in ends if low is not None and high is not None])
    assert covered == pytest.approx(0.95, abs=0.012)


# --- steps


def test_steps_are_compared_as_ratios_on_a_logarithmic_scale() -> None:
    found = steps([100, 150, 100], [400, 450, 800])
    logs = [math.log(4), math.log(3), math.log(8)]
    mean, low, high = interval(logs)
    assert found.mean == pytest.approx((4 * 3 * 8) ** (1 / 3))
    assert (found.low, found.high) == pytest.approx((math.exp(low or 0), math.exp(high or 0)))
    assert math.log(found.mean or 0) == pytest.approx(mean)
    assert found.bound == ""


def test_a_side_that_never_got_there_gives_a_bound() -> None:
    least = steps([100, 200], [None, 400])
    assert (least.bound, least.mean) == ("at least", pytest.approx(math.sqrt(10 * 2)))
    assert least.low is not None
    assert least.high is None
    most = steps([None, 200], [100, 400])
    assert (most.bound, most.mean) == ("at most", pytest.approx(math.sqrt(0.1 * 2)))
    assert most.low is None
    assert most.high is not None


def test_pairs_that_say_nothing_are_left_out_and_counted() -> None:
    found = steps([100, None, 200], [400, None, 400])
    assert (found.pairs, found.left_out) == (2, {"neither reached 99%": 1})
    nothing = steps([None, None], [None, None])
    assert (nothing.pairs, nothing.mean, nothing.left_out) == (0, None, {"neither reached 99%": 2})


def test_bounds_in_both_directions_give_no_number() -> None:
    found = steps([100, None, 100], [None, 100, 400])
    assert (found.pairs, found.mean, found.low, found.high) == (3, None, None, None)
    assert found.bound == "bounds in both directions"


def test_the_closed_end_of_bounds_holds_for_the_ratio_itself() -> None:
    """It does so about as often as it says though bounds are skewed, wherever training is cut off."""
    rng = np.random.default_rng(1)
    for cut in (-0.7, 0.0, 0.7):
        of, against = rng.normal(0, 0.3, size=(2000, 3)), rng.normal(1, 0.7, size=(2000, 3))
        bounds = np.minimum(against, 1 + cut) - of
        lows = [interval(row.tolist())[1] for row in bounds]
        assert np.mean([low is not None and low <= 1 for low in lows]) > 0.95


# --- runs that end early


def test_settings_of_a_report_are_those_of_its_recipe() -> None:
    for name, path in builtin_recipes().items():
        content = tomllib.loads(path.read_text())
        text = {"data.paths": ["text"]} if "data" in content else {}
        for size in ("small", *content.get("sizes", {})):
            recipe = load_recipe(name, text, size)
            found = grid("task", {}, [], recipe=recipe.model_dump(mode="json"))
            for cell in recipe.grid().values():
                made = variant(cell.name, [], labels=cell.labels)
                assert settings_of(found, made, "training") == cell.training.model_dump()
                assert settings_of(found, made, "task") == (cell.task or {})


def stopped_at(tops: Iterable[float]) -> Report:
    """Runs that end above 99%, at these accuracies, and others that stay at a half; pairs of all kinds."""
    ends = iter(tops)

    def runs(kinds: str) -> list[RunResult]:
        return [
            run(seed, [at(25, 0.3), at(50, next(ends) if kind == "s" else 0.5)])
            for seed, kind in enumerate(kinds)
        ]

    kinds = {("shift", "8"): "sss", ("shift", "16"): "s..", ("plain", "8"): "s..", ("plain", "16"): "sss"}
    return grid(
        "task",
        {labels: runs(kind) for labels, kind in kinds.items()},
        ["variant", "width"],
        comparisons=[{**COMPARED, "metric": "accuracy"}],
        recipe={"training": {"until_accuracy": 0.99}},
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.99, 1), min_size=8, max_size=8))
def test_how_far_above_its_end_a_run_came_does_not_count(tops: list[float]) -> None:
    found, exact = stopped_at(tops), stopped_at([0.99] * 8)
    assert differences(found) == differences(exact)
    assert summary_rows(found) == summary_rows(exact)
    assert render_markdown(found) == render_markdown(exact)
    assert render_markdown(found).count("Runs end at 99% and count as 99%.") == 2


def test_without_an_end_accuracies_count_as_they_are() -> None:
    found = stopped_at([0.991, 0.995, 1.0, 0.999, 0.992, 0.993, 0.994, 0.998])
    recipe = {**found.recipe, "training": {"until_accuracy": None}}
    free = found.model_copy(update={"recipe": recipe})
    assert summary_rows(free)[0]["final_accuracy"]["max"] == 1.0
    assert "Runs end" not in render_markdown(free)


# --- runs that diverge


@given(st.integers(1, 999))
def test_when_a_run_diverged_makes_no_difference_to_its_steps(step: int) -> None:
    blown = [learner(seed, None, steps=step * seed // 2, status="diverged") for seed in (1, 2)]
    fast = [learner(seed, 100) for seed in (1, 2)]
    recipe = {"training": {"steps": 700}, "variants": {"shift": {"training": {"steps": 1000}}, "plain": {}}}
    asked = [{**COMPARED, "metric": "steps_to_99"}]
    for name, bound, ratio in (("shift", "at most", 0.1), ("plain", "at least", 7)):
        cells = {("shift",): fast, ("plain",): fast, (name,): blown}
        (found,) = differences(grid("task", cells, ["variant"], comparisons=asked, recipe=recipe))
        assert (found.bound, found.mean) == (bound, pytest.approx(ratio))


LN_64 = math.log(64)


@pytest.mark.parametrize(
    ("made", "share"),
    [
        (ended(0, LN_64), 0.0),
        (ended(0, math.nextafter(LN_64, 9)), 1.0),
        (ended(0, math.nan), 1.0),
        (ended(0, math.inf), 1.0),
        (run(0, [], status="diverged"), 1.0),
        (ended(0, 0.1, status="diverged"), 1.0),
        (ended(0, 9.0, status="failed"), None),
        (ended(0, 9.0, status="interrupted"), None),
        (run(0, [], status="pending"), None),
        (run(0, []), None),
    ],
)
@pytest.mark.parametrize(
    "facts",
    [
        {"data": {"vocab_size": 64}, "recipe": {"task": {"name": "induction", "vocab_size": 512}}},
        {"data": {}, "recipe": {"task": {"name": "induction", "vocab_size": 64}}},
        {
            "data": {},
            "recipe": {"task": {"name": "induction"}, "variants": {"a": {"task": {"vocab_size": 64}}}},
        },
    ],
)
def test_a_run_diverged_if_it_ends_worse_than_guessing(
    made: RunResult, share: float | None, facts: dict[str, Any]
) -> None:
    asked = {"of": "b", "against": "a", "metric": "diverged"}
    cells = {("a",): [made], ("b",): [ended(0, 0.1)]}
    found = grid("task", cells, ["variant"], comparisons=[asked], **facts)
    assert final_value(found, found.variants[0], made, "diverged") == share
    (compared,) = differences(found)
    if share is None:
        reason = "not measured" if made.status == "finished" else made.status
        assert (compared.pairs, compared.left_out) == (0, {reason: 1})
    else:
        assert (compared.pairs, compared.mean) == (1, -share)


def test_a_task_of_its_own_vocabulary_has_its_guessing() -> None:
    words = build_task({"name": "igsm"}).vocab_size
    runs = [ended(seed, math.log(words) + sign * 1e-9) for seed, sign in enumerate((-1, 1))]
    found = grid("task", {("a",): runs}, ["variant"], recipe={"task": {"name": "igsm"}}, data={})
    assert [final_value(found, found.variants[0], each, "diverged") for each in runs] == [0.0, 1.0]


def test_runs_that_diverged_are_counted_with_an_interval_of_their_share() -> None:
    rows = summary_rows(divergence_report("diverged"))
    assert [(row["diverged"]["runs"], row["diverged"]["of"]) for row in rows] == [
        *((0, 5), (1, 5), (3, 5), (5, 5)),
        *((0, 5), (0, 5), (2, 5), (5, 5)),
    ]
    low, high = wilson(3, 5)
    assert (rows[2]["diverged"]["low"], rows[2]["diverged"]["high"]) == pytest.approx((low, high))
    text = render_markdown(divergence_report("diverged", "loss"))
    assert "| 0/5 (0–43%) |" in text
    assert "runs that diverged" in text
    assert all(row["diverged"] is None for row in summary_rows(divergence_report("loss")))
    assert "Diverged" not in render_markdown(divergence_report("loss"))


def wilson(count: int, total: int) -> tuple[float, float]:
    """Where the normal approximation's test of a share stops refusing it."""
    z, share = stats.norm.ppf(0.975), count / total
    middle, reach = (
        share + z**2 / (2 * total),
        z * math.sqrt((share * (1 - share) + z**2 / (4 * total)) / total),
    )
    return (middle - reach) / (1 + z**2 / total), (middle + reach) / (1 + z**2 / total)


def test_pairs_that_are_all_equal_have_no_interval_in_any_metric() -> None:
    none, some, *_ = differences(divergence_report("diverged"))
    assert (none.pairs, none.mean, none.low, none.high) == (5, 0, None, None)
    assert some.low is not None
    same = [two(losses(FIRST), losses(FIRST), metric) for metric in ("loss", "accuracy")]
    for found in (*same, steps([100, 100], [400, 400]), steps([100, 100], [None, None])):
        assert (found.pairs > 1, found.low, found.high) == (True, None, None)
        assert found.agree
    assert "Where all pairs are equal there is no interval." in render_markdown(divergence_report("diverged"))
    assert "all pairs are equal" not in render_markdown(steps_report())


# --- what is missing


@pytest.mark.parametrize("status", ["diverged", "failed", "pending", "interrupted"])
def test_unfinished_runs_are_left_out_and_counted(status: str) -> None:
    lost = run(1, losses(FIRST)[1].curve, status=status)
    of = losses(FIRST)
    found = two([of[0], lost, *of[2:]], losses(SECOND))
    kept = [0, 2, 3]
    assert_as_scipy(found, [FIRST[i] for i in kept], [SECOND[i] for i in kept])
    assert found.left_out == {status: 1}


def test_a_run_that_diverged_never_gets_there_and_one_that_failed_might_have() -> None:
    of = [learner(0, 100), learner(1, 100)]
    diverged = learner(0, None, steps=500, status="diverged")  # no recipe says that more were planned
    failed = learner(1, None, steps=500, status="failed")
    found = two(of, [diverged, failed], "steps_to_99")
    assert (found.mean, found.bound, found.left_out) == (pytest.approx(5), "at least", {"failed": 1})


def test_one_pair_has_no_interval() -> None:
    found = two(losses(FIRST[:1]), losses(SECOND))
    assert (found.pairs, found.low, found.high) == (1, None, None)


def test_a_value_that_is_not_there_is_not_compared() -> None:
    found = two(losses(FIRST), [ended(0, math.nan), *losses(SECOND)[1:]])
    assert (found.pairs, found.left_out) == (3, {"not measured": 1})


def test_a_pool_rests_on_the_cells_that_have_pairs_and_the_seeds_that_all_of_them_have() -> None:
    lost = [run(seed, [], status="diverged") for seed in range(4)]
    cells = {
        ("shift", "a"): losses(FIRST),
        ("shift", "b"): [lost[0], *losses(FIRST)[1:]],
        ("shift", "c"): losses(FIRST),
        ("plain", "a"): losses(SECOND),
        ("plain", "b"): losses(SECOND),
        ("plain", "c"): lost,
    }
    *_, pooled = differences(grid("text", cells, ["variant", "rate"], comparisons=[COMPARED]))
    assert_as_scipy(pooled, FIRST[1:], SECOND[1:])
    assert (pooled.cells, pooled.cells_compared) == (2, 3)
    assert pooled.left_out == {"not in every cell": 1}
    assert where(pooled) == "pooled over 2 of 3"


def test_recipes_without_comparisons_have_no_differences() -> None:
    report = grid("text", {("shift",): losses(FIRST)}, ["variant"])
    assert differences(report) == []
    assert differences(report.model_copy(update={"recipe": {}})) == []


# --- shown


def test_json_rows_have_the_differences_and_scores_of_their_variant() -> None:
    rows = {row["variant"]: row for row in summary_rows(width_report())}
    assert all(rows[f"2 layers, {width}"]["differences"] == [] for width in (8, 16, 64))
    own = rows["1 layer + KV shift, 16"]["differences"]
    assert [(each["metric"], each["where"], each["cells_compared"]) for each in own] == [
        ("accuracy", {"hidden size": "16"}, 1),
        ("accuracy", {}, 3),
        ("steps_to_99", {"hidden size": "16"}, 1),
        ("steps_to_99", {}, 3),
    ]
    json.dumps(rows, allow_nan=False)
    (vanilla, _) = summary_rows(score_report())
    assert vanilla["scores"]["test strict"]["mean"] == pytest.approx(0.675)


def test_terminal_shows_differences() -> None:
    output = io.StringIO()
    print_summary(width_report(), Console(file=output, width=80))
    _, _, table = output.getvalue().partition("Differences over pairs")
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert "1 layer + KV shift vs 2 layers, accuracy" in lines
    (line,) = (line for line in lines if line.startswith("hidden size 16 at least"))
    assert line.endswith("∞ 3")
    assert "1 left out: failed" in lines


def test_a_short_table_shows_large_grids_pooled() -> None:
    names = [str(width) for width in range(1, 9)]
    cells = {(name, width): losses(FIRST) for name in ("shift", "plain") for width in names}
    found = differences(grid("text", cells, ["variant", "width"], comparisons=[COMPARED]))
    assert len(difference_lines(found)) == 9
    (line,) = difference_lines(found, short=True)
    assert (line.where, line.mean) == ("pooled over 8", "0.000 nats")

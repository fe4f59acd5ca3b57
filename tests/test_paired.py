"""Differences paired by seed: against scipy, by hand, by simulation, and where runs are missing."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from reports import ended, grid, learner, run, score_report, width_report
from rich.console import Console
from scipy import stats

from keyshift.report import print_summary, summary_rows
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
    assert pooled.high - pooled.low == pytest.approx(0, abs=1e-12)  # per seed the cells cancel


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
    diverged = learner(0, None, steps=500, status="diverged")
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

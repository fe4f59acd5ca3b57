"""Scaling laws: planted ones are found, intervals cover them; a real comparison end to end; the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium_fixture, console_errors, requested_urls, resize  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import ended, grid
from rich.console import Console
from typer.testing import CliRunner

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.cli import app
from keyshift.compare import compare
from keyshift.recipe import parse_recipe
from keyshift.report.files import write
from keyshift.results import Report, RunResult
from keyshift.scaling import Curve, ScalingReport, Size, fit, fit_scaling, print_scaling
from keyshift.scaling.figure import draw_scaling
from keyshift.scaling.page import render_scaling, write_scaling
from keyshift.scaling.points import non_embedding_parameters, read_curves, read_reports

NOISE = 0.004


def silent(*_: object) -> None: ...


def sizes(
    counts: list[float], floor: float, scale: float, exponent: float, seeds: int, noise: float, draw: int = 0
) -> list[Size]:
    """Losses of a law at these numbers of parameters, with noise of a relative size."""
    random = np.random.default_rng(draw)
    return [
        Size(
            parameters=int(count),
            tokens=1000,
            losses=[
                float((floor + scale * count**-exponent) * np.exp(noise * random.normal()))
                for _ in range(seeds)
            ],
            where="x",
        )
        for count in counts
    ]


FOUR = [1e6, 4e6, 16e6, 64e6, 256e6]


@settings(deadline=None, max_examples=30)
@given(st.floats(0.3, 2.5), st.floats(2, 200), st.floats(0.1, 0.6))
def test_a_law_without_noise_is_found(floor: float, scale: float, exponent: float):
    law = fit(sizes(FOUR, floor, scale, exponent, seeds=1, noise=0))
    assert law.kind == "offset"
    assert law.error < 1e-6
    assert law.exponent.value == pytest.approx(exponent, rel=0.02)
    assert law.floor.value == pytest.approx(floor, rel=0.02)
    assert law.scale.value == pytest.approx(scale, rel=0.2)
    assert law.exponent.low is None


@given(st.floats(2, 200), st.floats(0.02, 1), st.integers(2, 3))
def test_fewer_than_four_sizes_are_a_pure_power_law(scale: float, exponent: float, count: int):
    law = fit(sizes(FOUR[:count], 0, scale, exponent, seeds=1, noise=0))
    assert (law.kind, law.floor) == ("power", None)
    assert law.exponent.value == pytest.approx(exponent, rel=1e-6)
    assert law.scale.value == pytest.approx(scale, rel=1e-5)


def test_intervals_of_a_power_law_cover_the_planted_exponent_as_often_as_they_say():
    covered, widths = 0, []
    for draw in range(300):
        law = fit(sizes(FOUR[:3], 0, 20, 0.12, seeds=3, noise=NOISE, draw=draw), draws=200, seed=draw)
        covered += law.exponent.low <= 0.12 <= law.exponent.high
        widths.append(law.exponent.high - law.exponent.low)
    assert 0.90 <= covered / 300 <= 0.99  # 95% but for 300 draws' own error of 1.3%
    exact = 2 * 2.447 * NOISE / np.sqrt(3 * 2) / np.log(4)  # Student's t with 6 degrees, known spread
    assert np.mean(widths) == pytest.approx(exact, rel=0.1)


def test_intervals_of_a_law_with_a_floor_cover_all_that_was_planted():
    covered = np.zeros(2)
    for draw in range(40):
        law = fit(sizes(FOUR, 1.5, 30, 0.25, seeds=3, noise=NOISE, draw=draw), draws=80, seed=draw)
        covered += [
            law.exponent.low <= 0.25 <= law.exponent.high,
            law.floor.low <= 1.5 <= law.floor.high,
        ]
    assert (covered >= 34).all(), covered


def test_the_band_runs_over_the_sizes_and_holds_the_law():
    law = fit(sizes(FOUR, 1.5, 30, 0.25, seeds=4, noise=NOISE))
    at, losses, lows, highs = map(np.array, zip(*law.band, strict=True))
    assert at[[0, -1]] == pytest.approx([1e6, 256e6])
    assert (lows < losses).all()
    assert (losses < highs).all()
    assert (np.diff(losses) < 0).all()
    assert losses == pytest.approx(1.5 + 30 * at**-0.25, rel=0.01)


def test_more_seeds_give_narrower_intervals():
    few, many = (fit(sizes(FOUR[:3], 0, 20, 0.12, seeds=seeds, noise=NOISE)).exponent for seeds in (3, 48))
    assert (many.high - many.low) < (few.high - few.low) / 2


# Reports

WIDTHS = {"8": 8, "16": 16, "32": 32}


def planted(folder: Path, axis: dict[str, int], exponents: dict[str, float], **changes: Any) -> Path:
    """A comparison on text with a variant per exponent at every width; the losses are 30 N^-exponent."""
    report = grid("text", {}, [], data={"vocab_size": 50}, recipe={"data": {"sequence_length": 16}})
    for name, exponent in exponents.items():
        for label, width in axis.items():
            made = grid("text", {(name, label): []}, ["variant", "width"]).variants[0]
            made.config = {"num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": width}
            model = KeyshiftForCausalLM(KeyshiftConfig(vocab_size=50, **made.config))
            made.parameters = model.num_parameters()
            n = non_embedding_parameters(report, made)
            made.runs = [ended(seed, 30 * n**-exponent * (1 + seed / 1000)) for seed in range(2)]
            report.variants.append(made)
    report = report.model_copy(update=changes)
    folder.mkdir(parents=True)
    write(folder / "report.json", report.model_dump_json().encode())
    return folder


@pytest.mark.parametrize(
    "fields", [{}, {"tie_word_embeddings": True}, {"position": "learned", "max_position_embeddings": 24}]
)
def test_embeddings_are_those_of_the_model(fields: dict[str, Any]):
    report = grid("text", {("v",): []}, ["variant"], data={"vocab_size": 50})
    variant = report.variants[0]
    variant.config = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, **fields}
    model = KeyshiftForCausalLM(KeyshiftConfig(vocab_size=50, **variant.config))
    variant.parameters = model.num_parameters()
    named = model.named_parameters()
    inner = sum(each.numel() for name, each in named if "embed" not in name and "head" not in name)
    assert non_embedding_parameters(report, variant) == inner


def test_variants_are_put_together_from_axes_and_folders(tmp_path: Path):
    exponents = {"GQA": 0.1, "GVA": 0.12}
    folders = [
        planted(tmp_path / "a", {"8": 8, "16": 16}, exponents),
        planted(tmp_path / "b", {"32": 32}, exponents),
    ]
    report = fit_scaling(folders, tmp_path / "out", silent)
    assert [curve.variant for curve in report.curves] == ["GQA", "GVA"]
    for curve in report.curves:
        places = [size.where.split("/")[-1] for size in curve.sizes]
        assert places == ["a, width 8", "a, width 16", "b, width 32"]
        assert curve.law.exponent.value == pytest.approx(exponents[curve.variant], rel=1e-6)
        assert curve.law.exponent.low <= exponents[curve.variant] <= curve.law.exponent.high
    assert "Fewer than 4 sizes" in report.remarks[0]
    read = ScalingReport.model_validate_json((tmp_path / "out/scaling.json").read_text())
    assert read == report
    assert (tmp_path / "out/figures/scaling.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_of_one_size_at_several_learning_rates_the_best_counts(tmp_path: Path):
    (tmp_path / "in").mkdir()
    cells = {
        ("GQA", label): [ended(seed, loss + seed / 10) for seed in range(2)]
        for label, loss in {"1e-3": 4.0, "1e-2": 3.0, "1e-1": 6.0}.items()
    }
    report = grid(
        "text",
        cells,
        ["variant", "learning rate"],
        data={"vocab_size": 50},
        recipe={"data": {"sequence_length": 16}},
    )
    write(tmp_path / "in/report.json", report.model_dump_json().encode())
    (curve,) = read_curves([tmp_path / "in"], read_reports([tmp_path / "in"]))
    assert [size.losses for size in curve.sizes] == [[3.0, 3.1]]
    assert curve.sizes[0].where.endswith("learning rate 1e-2")


def test_runs_that_did_not_finish_are_left_out_and_counted(tmp_path: Path):
    folder = planted(tmp_path / "a", WIDTHS, {"GQA": 0.1})
    report = Report.model_validate_json((folder / "report.json").read_text())
    for variant in report.variants:
        variant.runs[1] = RunResult(seed=1, status="diverged", steps=3)
    write(folder / "report.json", report.model_dump_json().encode())
    found = fit_scaling([folder], tmp_path / "out", silent)
    assert found.curves[0].sizes[0].lost == 1
    assert found.curves[0].remark == "no size has two seeds: no intervals"
    assert any(remark.startswith("3 runs diverged") for remark in found.remarks)


def test_mistakes_are_one_line(tmp_path: Path):
    good = planted(tmp_path / "good", WIDTHS, {"GQA": 0.1})
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/report.json").write_text("{}")
    other = planted(tmp_path / "other", WIDTHS, {"GQA": 0.1}, data={"vocab_size": 60})
    longer = planted(tmp_path / "longer", WIDTHS, {"GQA": 0.1}, recipe={"data": {"sequence_length": 32}})
    single = planted(tmp_path / "single", {"8": 8}, {"GQA": 0.1})
    (tmp_path / "file").write_text("")
    for folders, out, message in (
        ([tmp_path / "empty"], "out", "empty has no report.json; give folders"),
        ([good, tmp_path / "bad"], "out", "bad/report.json is not a comparison's report"),
        ([good, other], "out", "vocab_size=60, and .*good 50: their losses"),
        ([good, longer], "out", "sequence_length=32, and .*good 16: their losses"),
        ([single], "out", "has finished runs at two sizes"),
        ([good], "file", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message) as error:
            fit_scaling(folders, tmp_path / out, silent)
        assert "\n" not in str(error.value)


def test_a_real_comparison_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    recipe = parse_recipe(
        {
            "title": "Induction at three widths",
            "seeds": 2,
            "task": {"name": "induction", "vocab_size": 24, "sequence_length": 16},
            "training": {"steps": 20, "batch_size": 8, "learning_rate": 1e-2, "eval_steps": 20},
            "model": {"num_hidden_layers": 1, "num_attention_heads": 2},
            "variants": {"GQA": {}, "GQA + KV shift": {"shift": "kv"}},
            "axes": {"hidden size": {width: {"hidden_size": int(width)} for width in WIDTHS}},
        },
        "test",
    )
    compare(recipe, tmp_path / "compared")
    arguments = ["scaling", str(tmp_path / "compared"), "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines()[:-1])) <= 80
    assert "GQA + KV shift" in shown.output
    printed = CliRunner().invoke(app, [*arguments, "--json"])
    curves = [Curve.model_validate(row) for row in json.loads(printed.stdout)]
    assert [len(curve.sizes) for curve in curves] == [3, 3]
    losses = {size.parameters: np.mean(size.losses) for size in curves[0].sizes}
    assert [size.parameters for size in curves[0].sizes] == sorted(losses)
    assert 0 < curves[0].law.error < 0.2
    assert (tmp_path / "out/scaling.html").read_text().startswith("<!doctype html>")


# The page


def drawn_report(names: list[str], floors: float = 1.5, seeds: int = 3) -> ScalingReport:
    curves = []
    for index, name in enumerate(names):
        own = sizes(FOUR, floors, 30 - 2 * index, 0.25, seeds=seeds, noise=NOISE, draw=index)
        curves.append(Curve(variant=name, sizes=own, law=fit(own, draws=60)))
    curves.append(
        Curve(variant="too few", sizes=own[:1], remark="1 size with finished runs: a law needs two")
    )
    return ScalingReport(
        title="Text: <b>GQA</b> & others",
        folders=["runs/a", "runs/b"],
        command="keyshift scaling runs/a runs/b",
        created="2026-01-05T09:30:00Z",
        environment={"torch": "2.13.0"},
        curves=curves,
        remarks=["Fewer than 4 sizes."],
    )


def test_the_table_fits_80_columns():
    report = drawn_report(["GQA", "GQA + KV shift with a long name, at its best learning rate"])
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_scaling(report, console)
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "too few: 1 size with finished runs" in shown


def test_the_page_escapes_and_asks_the_network_for_nothing(tmp_path: Path, chromium: Any):
    report = drawn_report(["GQA", "GQA + KV shift", "MLA", "GVA", "GVA + shift"])
    write_scaling(report, tmp_path)
    requested_urls(chromium)
    for width in (360, 1200):
        resize(chromium, width)
        chromium.get((tmp_path / "scaling.html").as_uri())
        assert not chromium.execute_script("return document.body.scrollWidth > window.innerWidth")
    assert all(url.startswith(("file:", "data:")) for url in requested_urls(chromium))
    assert console_errors(chromium) == []
    assert chromium.find_element("css selector", "h1").text == "Scaling: Text: <b>GQA</b> & others"
    assert len(chromium.find_elements("css selector", "[aria-label=Laws] tbody tr")) == 6
    assert len(chromium.find_elements("css selector", "[aria-label=Sizes] tbody tr")) == 26
    picture = chromium.find_element("css selector", "figure img")
    assert chromium.execute_script("return arguments[0].naturalWidth", picture) > 300


def test_the_same_report_gives_the_same_page():
    report = drawn_report(["GQA"])
    assert render_scaling(report, draw_scaling(report)) == render_scaling(report, draw_scaling(report))

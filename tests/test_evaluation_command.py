"""``keyshift eval`` as a user meets it: tables, files, seeds, papers, mistakes in a line, a kill survived."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
import typer
from benchmark_mirror import text, write_data_set, write_mirror
from commands import exit_code
from rich.console import Console
from scipy import stats

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, cli
from keyshift.data import train_tokenizer
from keyshift.evaluation.paper_tables import GVA, KV_SHIFT, PAPERS
from keyshift.evaluation.report import print_eval, summary
from keyshift.evaluation.report.files import render
from keyshift.evaluation.report.values import paper_rows
from keyshift.evaluation.results import EvalReport, Score
from keyshift.evaluation.tasks import plan_tasks

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a comparison of two variants and two seeds, a data mirror, and held-out text."""
    root = tmp_path_factory.mktemp("workplace")
    write_mirror(root / "mirror")
    rng = random.Random(0)
    (root / "held_out.txt").write_text(text(rng, 2000))
    tokenizer = train_tokenizer([text(rng, 200) for _ in range(20)], 320)
    for variant, changes in (
        ("gqa", {}),
        ("gva-shift", {"attention": "gva", "shift": "kv", "position": "none"}),
    ):
        for seed in (0, 1):
            torch.manual_seed(seed)
            folder = root / "runs/text/runs" / variant / f"seed-{seed}" / "checkpoint-20"
            config = KeyshiftConfig(vocab_size=len(tokenizer), **SIZES, **changes)
            KeyshiftForCausalLM(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return root


@pytest.fixture
def here(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as working directory; its results go elsewhere for every test."""
    monkeypatch.chdir(workplace)
    return tmp_path / "out"


# What it says and writes


def test_a_comparison_is_scored_by_variant_over_its_seeds(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    tasks = "paper-gva,hellaswag,lambada_openai,icl,repeated,passkey"
    options = ("--tasks", tasks, "--data-root", "mirror", "--text", "held_out.txt", "--limit", "4")
    assert exit_code(monkeypatch, "eval", "runs/text", *options, "--out", str(here)) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert last == f"report: {here / 'eval.md'}"
    report = EvalReport.model_validate_json((here / "eval.json").read_text())
    assert report.models == {
        name: [f"runs/text/runs/{name}/seed-{seed}/checkpoint-20" for seed in (0, 1)]
        for name in ("gqa", "gva-shift")
    }
    assert {name.split()[0] for line in lines if (name := line.strip())} >= {
        "gqa",
        "gva-shift",
        "GQA*",
        "passkey",
    }
    names = [(score.checkpoint, score.task, score.metric) for score in report.scores]
    assert len(names) == len(set(names))  # hellaswag was asked for twice
    assert all(score.questions <= 20 for score in report.scores)

    rows = {(row["model"], row["task"], row["metric"]): row for row in summary(report)}
    both = list(rows["gqa", "icl", "score"]["values"].values())
    reach = stats.t.ppf(0.975, 1) * stdev(both) / 2**0.5
    assert rows["gqa", "icl", "score"]["high"] == pytest.approx(fmean(both) + reach)
    markdown = (here / "eval.md").read_text()
    assert "| GVA + DRoPE d\\_r=16 \\* | 42.69 | 53.35 | 33.60 | 63.81 | 28.32 | 44.35 |" in markdown
    assert "\n| gva-shift |" in markdown
    assert not [path for path in here.iterdir() if path.name.endswith(".tmp")]

    assert exit_code(monkeypatch, "eval", "runs/text", *options, "--out", str(here), "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(json.dumps(summary(report)))
    assert printed.err.splitlines()[-1] == last


def scores(values: dict[str, list[float]]) -> list[Score]:
    """One score per checkpoint and column of the GVA table."""
    return [
        Score(
            model=name.split("-")[0],
            checkpoint=name,
            task=column.task,
            shots=0,
            metric=column.metric,
            value=value / 100,
            questions=10,
        )
        for name, row in values.items()
        for column, value in zip(GVA.columns, row, strict=False)
    ]


def report_of(values: dict[str, list[float]]) -> EvalReport:
    models: dict[str, list[str]] = {}
    for name in values:
        models.setdefault(name.split("-")[0], []).append(name)
    found = scores(values)
    return EvalReport(
        command="", created="", environment={}, settings={}, models=models, answers={}, scores=found
    )


def test_averages_of_a_papers_table_are_taken_seed_by_seed() -> None:
    report = report_of(
        {"a-0": [40, 50, 30, 60, 20], "a-1": [42, 50, 31, 60, 27], "b-0": [1, 2, 3, 4, 5], "c-0": [10, 20]}
    )
    rows = paper_rows(report, GVA)
    assert [mean.value for mean in rows["a"] if mean] == pytest.approx([41, 50, 30.5, 60, 23.5, 41])
    *_, average = rows["a"]
    assert average is not None
    assert average.reach == pytest.approx(stats.t.ppf(0.975, 1) * stdev([40, 42]) / 2**0.5)
    assert rows["a"][1] is not None
    assert rows["a"][1].reach is None  # equal seeds tell no width
    assert rows["b"][-1] == (3.0, None, None, 1)
    assert rows["c"][2:] == [None] * 4  # no average of a row with gaps


def test_tables_fit_80_columns_for_every_paper(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of({f"a model with a long name indeed-{seed}": [40.0 + seed] * 5 for seed in range(3)})
    tables = [table for group in PAPERS.values() for table in group]
    print_eval(report, tables, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for table in tables:
        for column in table.columns:
            assert any(column.title in line for line in lines), column.title
        assert table.note.split()[0] in render(report, tables)


@pytest.mark.parametrize("table", [GVA, KV_SHIFT], ids=lambda table: table.source)
def test_published_averages_are_those_of_their_rows(table: Any) -> None:
    for name, (*values, average) in table.rows.items():
        assert len(values) == len(table.columns)
        assert average == pytest.approx(fmean(values), abs=0.011), name


def test_the_columns_of_the_papers_are_tasks_of_the_harness() -> None:
    pytest.importorskip("lm_eval")
    from keyshift.evaluation.benchmarks import _manager as manager

    known = manager().all_tasks
    for name in PAPERS:
        for names in plan_tasks(name, None).harness.values():
            assert set(names) <= set(known)


@pytest.mark.slow
def test_the_tables_of_the_kv_shifting_paper_are_filled(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify")
    mirror = write_mirror(tmp_path / "mirror")
    import benchmark_mirror

    from keyshift.evaluation.benchmarks import _manager as manager

    index = manager().task_index
    for data, row in (("cais/mmlu", benchmark_mirror.mmlu), ("haonan-li/cmmlu", benchmark_mirror.cmmlu)):
        entries = (entry.cfg or {} for entry in index.values())
        configs = {
            cfg["dataset_name"]
            for cfg in entries
            if cfg.get("dataset_path") == data and "dataset_name" in cfg
        }
        mine = sorted(name for name in configs if isinstance(name, str))
        write_data_set(mirror, data, row, dict.fromkeys(mine, ("test", "validation", "dev")))
    options = ("--tasks", "paper-kvshift", "--data-root", str(mirror), "--limit", "1", "--out", str(here))
    assert exit_code(monkeypatch, "eval", "G=runs/text/runs/gqa/seed-0", *options) == 0
    report = EvalReport.model_validate_json((here / "eval.json").read_text())
    for table in PAPERS["paper-kvshift"]:
        (row_,) = paper_rows(report, table).values()
        assert None not in row_, table.title
    mmlu = {score.shots: score for score in report.scores if score.task == "mmlu" and score.metric == "acc"}
    assert set(mmlu) == {0, 5}
    assert mmlu[5].questions == 57
    assert mmlu[5].truncated > mmlu[0].truncated


def test_the_documented_commands_and_options_are_those_that_there_are(workplace: Path) -> None:
    page = (Path(__file__).parents[1] / "docs/evaluate.md").read_text()
    command = typer.main.get_command(cli.app).commands["eval"]  # type: ignore[attr-defined]
    options = {name for each in command.params for name in each.opts if name.startswith("--")}
    _, _, table = page.partition("\n## Options\n")
    assert set(re.findall(r"^\| `(--[\w-]+)` \|", table, re.MULTILINE)) == options
    lines = re.findall(r"^keyshift eval .*$", page, re.MULTILINE)
    assert len(lines) > 4
    for line in lines:
        words = shlex.split(line)
        assert {word for word in words if word.startswith("--")} <= options, line
        plan_tasks(words[words.index("--tasks") + 1], None)
    for folder in re.findall(r"`DIR/([\w./-]+)`", page):
        assert (workplace / "mirror" / folder).is_dir()  # where these tests put them


# Mistakes


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command ends with, exit code 2."""
    assert exit_code(monkeypatch, "eval", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


GQA = "runs/text/runs/gqa"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tasks", "helaswag"), "'helaswag' is not a task; did you mean hellaswag"),
        (("--tasks", "icll"), "did you mean icl"),
        (("--tasks", ","), "names no task"),
        (("--tasks", "paper-gva", "--num-fewshot", "5"), "paper-gva has its own numbers of examples"),
        (("--tasks", "icl", "--limit", "0"), "--limit=0 must be at least 1"),
        (("--tasks", "icl", "--batch-size", "0"), "--batch-size=0 must be at least 1"),
        (("--tasks", "passkey", "--dtype", "fp8"), "--dtype='fp8' is not known"),
        (("--tasks", "passkey", "--device", "gpu"), "--device='gpu' cannot be used"),
        (("--tasks", "icl"), "pass files or a prepared store with --text"),
        (("--tasks", "icl", "--text", "none.txt"), "no such file or folder"),
        (("--tasks", "passkey", "--out", "held_out.txt"), "is a file; pass a folder"),
        (("--tasks", "boolq", "--data-root", "mirror"), "task boolq reads"),
        (
            ("--tasks", "boolq", "--data-root", "none"),
            "none: no such folder; pass one with copies of the data sets",
        ),
        (("--tasks", "mmlu_virology", "--data-root", "mirror"), "README.md"),
        (("--tasks", "cola"), "pass --data-root DIR"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...],
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--out" not in arguments:
        arguments = (*arguments, "--out", str(here))
    assert said in refused(monkeypatch, capsys, GQA, *arguments)
    assert not here.exists() or not list(here.glob("eval.*"))


def test_missing_data_names_the_folder_that_is_looked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    Path("part/Rowan/hellaswag").mkdir(parents=True, exist_ok=True)
    line = refused(
        monkeypatch, capsys, GQA, "--tasks", "paper-gva", "--data-root", "part", "--out", str(here)
    )
    assert f"task winogrande reads {Path('part/allenai/winogrande').absolute()}, which is not there" in line


def test_without_the_harness_its_tasks_are_refused_and_the_built_in_ones_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    line = refused(monkeypatch, capsys, GQA, "--tasks", "hellaswag", "--out", str(here))
    assert "pip install 'keyshift[eval]'" in line
    options = ("--tasks", "repeated", "--text", "held_out.txt", "--limit", "2", "--out", str(here))
    assert exit_code(monkeypatch, "eval", GQA, *options) == 0


def test_help_loads_neither_the_harness_nor_torch() -> None:
    script = (
        "import sys; sys.argv = ['keyshift', 'eval', '--help']\n"
        "import keyshift\n"
        "from keyshift import cli\n"
        "try: cli.main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'lm_eval', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--data-root" in done.stdout


# Interrupted


def kept(out: Path) -> int:
    """How many answers a run has committed so far."""
    with contextlib.suppress(sqlite3.Error, ValueError):
        (file,) = (out / "answers").glob("*.sqlite")
        base = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
        with contextlib.closing(base):
            return int(base.execute("SELECT count(*) FROM answers").fetchone()[0])
    return 0


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_evaluation_leaves_nothing_half_written_and_goes_on(
    signal_: signal.Signals, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["runs/text/runs/gqa/seed-0", "--tasks", "passkey", "--limit", "8", "--out", str(here)]
    command = [sys.executable, "-m", "keyshift.cli", "eval", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs ignore it
    process = subprocess.Popen(command, env=environment, preexec_fn=hear)
    try:
        deadline = time.monotonic() + 120
        while kept(here) < 1 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal_)
        assert process.wait(60) == (130 if signal_ == signal.SIGINT else -9)
    finally:
        process.kill()
    assert [path.name for path in here.iterdir()] == ["answers"]
    stopped_at = kept(here)
    assert exit_code(monkeypatch, "eval", *options) == 0
    assert 1 <= stopped_at < kept(here)
    resumed = EvalReport.model_validate_json((here / "eval.json").read_text())
    assert exit_code(monkeypatch, "eval", *options[:-1], str(here / "fresh")) == 0
    fresh = EvalReport.model_validate_json((here / "fresh/eval.json").read_text())
    assert resumed.scores == fresh.scores

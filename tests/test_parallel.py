"""Runs in several processes: same numbers, and what is left when workers, the parent or the user end them."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import psutil
import pytest
import torch
from rich.console import Console
from test_compare import TRAINING, corpus, numbers, recipe, text_recipe

from keyshift import parallel, runs
from keyshift.compare import Hooks, compare
from keyshift.errors import RunError, UserError
from keyshift.progress import follow
from keyshift.results import Report, RunResult
from keyshift.runs import Run, Sources, plan
from keyshift.training import Progress

ONE_LAYER = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
ENDLESS = f"""
title = "endless"
seeds = 1
task = {{ name = "induction", vocab_size = 24, sequence_length = 16 }}
training = {{ steps = 100000, batch_size = 2, eval_steps = 100000, eval_batches = 1, save_steps = 20 }}
model = {{ {", ".join(f"{key} = {value}" for key, value in ONE_LAYER.items())} }}

[variants.GQA]

[variants."GQA + shift"]
shift = "kv"
"""


def test_several_at_a_time_give_the_numbers_of_one_at_a_time_in_workers_that_are_kept(tmp_path):
    workers: dict[Run, set[int]] = {}
    hooks = Hooks(finished=lambda run, result: workers.update({run: {c.pid for c in children()}}))
    report = compare(recipe(), tmp_path / "two", jobs=2, hooks=hooks)
    assert report.complete
    assert numbers(report) == numbers(compare(recipe(), tmp_path / "one"))
    assert len(workers) == 6
    assert len(set().union(*workers.values())) == 2
    assert report.environment["threads"] == "1"
    assert children() == []


@pytest.mark.slow
def test_text_is_prepared_once_and_opened_by_the_workers(tmp_path):
    chosen = text_recipe([str(corpus(tmp_path / "text"))])
    read = []
    hooks = Hooks(preparing=lambda done, total: read.append(done))
    two = compare(chosen, tmp_path / "two", jobs=2, hooks=hooks)
    assert numbers(two) == numbers(compare(chosen, tmp_path / "one"))
    assert read.count(max(read)) == 1


def test_a_killed_worker_fails_its_run_alone_and_resuming_repeats_only_that(tmp_path):
    chosen = recipe(seeds=1, training={**TRAINING, "steps": 200, "save_steps": 10})
    killed: list[Run] = []

    def kill(run: Run, progress: Progress) -> None:
        if not killed and progress.step > 10 and list(run.directory.glob("checkpoint-*")):
            killed.append(run)
            holder(run).kill()

    report = compare(chosen, tmp_path / "out", jobs=2, hooks=Hooks(progress=kill))
    results = {variant.name: variant.runs[0] for variant in report.variants}
    failed = results.pop(killed[0].variant.name)
    assert failed.status == "failed"
    assert "was killed (out of memory?); --resume goes on" in failed.message
    assert failed.steps >= 10
    assert {result.status for result in results.values()} == {"finished"}
    assert not report.complete

    steps: dict[str, list[int]] = {}
    hooks = Hooks(progress=lambda run, progress: steps.setdefault(run.name, []).append(progress.step))
    again = compare(chosen, tmp_path / "out", jobs=2, resume=True, hooks=hooks)
    assert again.complete
    assert list(steps) == [killed[0].name]
    assert steps[killed[0].name][0] > 10  # from its checkpoint
    assert numbers(again) == numbers(compare(chosen, tmp_path / "whole"))


@pytest.mark.slow
def test_what_goes_wrong_in_one_run_is_its_own_and_more_jobs_than_runs_do_no_harm(tmp_path):
    """A checkpoint that cannot be read, one that cannot be written, and a NaN: the others finish."""
    hot = {"training": {"learning_rate": 1e25}}
    variants = {"unreadable": {}, "unwritable": {}, "hot": hot, "sound": {}}
    broken = tmp_path / "runs/unreadable/seed-0/checkpoint-5"
    broken.mkdir(parents=True)
    (tmp_path / "runs/unwritable/seed-0").mkdir(parents=True)
    (tmp_path / "runs/unwritable/seed-0/.saving").write_text("a file where a folder has to be")
    report = compare(recipe(seeds=1, variants=variants), tmp_path, jobs=7, resume=True)
    runs = {variant.name: variant.runs[0] for variant in report.variants}
    assert [run.status for run in runs.values()] == ["failed", "failed", "diverged", "finished"]
    assert f"checkpoint {broken} cannot be read" in runs["unreadable"].message
    assert "cannot save the checkpoint of step 5" in runs["unwritable"].message
    assert not any("\n" in str(run.message) for run in runs.values())


def test_an_error_nobody_foresaw_is_reported_with_its_traceback(tmp_path, monkeypatch):
    def fail(*args: object) -> RunResult:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(runs, "_trained", fail)
    (run, *_) = plan(recipe(), Sources(recipe(), None), tmp_path)
    ignored = {"stop": lambda: False, "on_progress": lambda progress: None}
    result = runs.attempt(run, Sources(recipe(), None), resume=False, **ignored)
    assert result.status == "failed"
    assert result.message == f"ZeroDivisionError: division by zero; see {run.directory / 'error.txt'}"
    assert "Traceback" in (run.directory / "error.txt").read_text()


def test_workers_that_cannot_begin_are_an_error_that_says_why_and_leave_a_report(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(parallel, "SERVE", "print('a hint'); raise SystemExit('no room for torch\\n')")
    with pytest.raises(RunError) as caught:
        compare(recipe(), tmp_path, jobs=2)
    message = str(caught.value)
    assert message.startswith("a worker process ended with exit code 1 before it could train")
    assert "no room for torch" in message
    assert "\n" not in message
    assert capfd.readouterr().err.count("a hint") == 2 + parallel.EARLY_DEATHS
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert {run.status for variant in report.variants for run in variant.runs} == {"pending"}
    assert children() == []


@pytest.mark.parametrize("deaths", [pytest.param(1, marks=pytest.mark.slow), 1 + parallel.EARLY_DEATHS])
def test_workers_killed_before_they_can_train_take_no_run_with_them(tmp_path, monkeypatch, deaths):
    """One is replaced; after several in a row the others do the work."""
    begin, begun_slots = parallel._Pool._begin, []

    def killed_at_first(pool: parallel._Pool, slot: int) -> None:
        begin(pool, slot)
        begun_slots.append(slot)
        if len(begun_slots) <= deaths:
            pool.workers[-1].process.kill()

    monkeypatch.setattr(parallel._Pool, "_begin", killed_at_first)
    report = compare(recipe(seeds=1), tmp_path, jobs=2)
    assert report.complete
    assert len(begun_slots) == 2 + min(deaths, parallel.EARLY_DEATHS)
    assert children() == []


@pytest.mark.slow
def test_what_a_worker_prints_goes_to_standard_error(tmp_path, monkeypatch, capfd):
    """Before it can train, and later: standard output may be the table as JSON."""
    chatty = "print('hello'); import atexit; atexit.register(print, 'goodbye'); "
    monkeypatch.setattr(parallel, "SERVE", chatty + parallel.SERVE)
    compare(recipe(seeds=1), tmp_path, jobs=2)
    said = capfd.readouterr()
    assert [said.err.count(word) for word in ("hello", "goodbye")] == [2, 2]
    assert said.out == ""


@pytest.mark.parametrize("jobs", [0, -1])
def test_fewer_than_one_job_is_refused(tmp_path, jobs):
    with pytest.raises(UserError, match=f"jobs={jobs} must be at least 1"):
        compare(recipe(), tmp_path, jobs=jobs)


def test_a_stop_before_workers_have_begun_is_over_at_once(tmp_path):
    report = compare(recipe(), tmp_path, jobs=2, hooks=Hooks(stop=lambda: True))
    assert {run.status for variant in report.variants for run in variant.runs} == {"pending"}
    assert children() == []


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_saves_all_running_runs_and_the_next_call_goes_on(tmp_path, number):
    process = begun(tmp_path, ENDLESS)
    group = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    if number == signal.SIGINT:  # as a terminal does
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "stopped early; the same command with --resume goes on" in output
    assert not psutil.wait_procs(group, timeout=5)[1]
    report = Report.model_validate_json((tmp_path / "out/report.json").read_text())
    ended = [variant.runs[0] for variant in report.variants]
    assert [run.status for run in ended] == ["interrupted"] * 2
    for folder, run in zip(("gqa", "gqa-shift"), ended, strict=True):
        assert (tmp_path / f"out/runs/{folder}/seed-0/checkpoint-{run.steps}").is_dir()


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path):
    process = begun(tmp_path, ENDLESS)
    group = psutil.Process(process.pid).children(recursive=True)
    for worker in group:
        worker.suspend()  # so that none can end in an orderly way
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not psutil.wait_procs(group, timeout=5)[1]


@pytest.mark.slow
def test_workers_whose_parent_is_killed_save_and_end(tmp_path):
    process = begun(tmp_path, ENDLESS.replace("save_steps = 20", "save_steps = 50"))
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(workers, timeout=60)[1]
    steps = [int(path.name.split("-")[1]) for path in tmp_path.glob("out/runs/*/*/checkpoint-*")]
    assert len(steps) == 2
    assert any(step % 50 for step in steps)  # not where checkpoints are due


def test_a_run_in_another_process_is_not_trained_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "PATIENCE", 0.1)
    sources = Sources(recipe(), None)
    (run, *_) = plan(recipe(), sources, tmp_path)
    run.directory.mkdir(parents=True)
    with filelock.FileLock(run.directory / ".lock"):
        result = runs.attempt(
            run, sources, resume=True, stop=lambda: False, on_progress=lambda progress: None
        )
    assert result.status == "failed"
    assert result.message.startswith(f"{run.directory} is in use by another process")


@pytest.mark.slow
def test_a_failed_run_is_exit_code_1_and_json_stays_json(tmp_path):
    text = ENDLESS.replace("steps = 100000, batch", "steps = 400, batch")
    process = begun(tmp_path, text, "--json")
    (victim,) = [
        worker
        for worker in psutil.Process(process.pid).children()
        if any("/gqa/" in file.path for file in worker.open_files())
    ]
    victim.kill()
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "GQA, seed 0: failed; its process was killed (out of memory?)" in errors
    assert errors.strip().splitlines()[-1].startswith("error: GQA, seed 0: its process was killed")
    assert {row["variant"]: row["status"] for row in json.loads(output)}["GQA"] == "failed"


def test_threads_are_shared_out_unless_the_user_has_said_how_many(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert [threads(workers) for workers in (1, 2, 3, 8, 20)] == ["8", "4", "2", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert threads(4) == "6"


def threads(workers: int) -> str:
    return parallel._environment(0, workers)["OMP_NUM_THREADS"]


def test_workers_are_spread_over_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [gpu(slot) for slot in range(3)] == ["5", "7", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [gpu(slot) for slot in range(3)] == ["0", "1", "0"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu(0) is None


def gpu(slot: int) -> str | None:
    return parallel._environment(slot, 3).get("CUDA_VISIBLE_DEVICES")


def test_workers_use_no_more_than_the_cores_of_the_process(tmp_path):
    """taskset and containers' cpusets count, not what the machine has."""
    core = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, [{core}]); from keyshift import parallel; "
    script += "print(parallel._environment(0, 1)['OMP_NUM_THREADS'])"
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "1", done.stderr


def test_bars_of_several_runs_fit_80_columns_and_failures_say_why(tmp_path):
    screen = io.StringIO()
    console = Console(force_terminal=True, width=80, file=screen, color_system=None)
    chosen = recipe(seeds=3, variants={"1-layer GVA + shift": {}, "2-layer GQA, window 3": {}})
    planned = plan(chosen, Sources(chosen, None), tmp_path)
    with follow(console, lambda: False) as hooks:
        hooks.planned(planned)
        for step in (1, 5, 12):
            for run in planned[:3]:
                hooks.progress(run, Progress(step, {"loss": 1.0, "eval_accuracy": 0.5}))
        hooks.finished(planned[0], RunResult(seed=0, status="failed", message="its process was killed"))
        time.sleep(0.3)  # bars are drawn now and then
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", screen.getvalue())]
    assert any(line.endswith("seed 0: failed; its process was killed") for line in lines)
    bars = [line for line in lines if "━" in line]
    assert {name for name in ("seed 1", "all runs") if any(name in bar for bar in bars)}
    assert max(len(bar) for bar in bars) <= 80


@pytest.mark.parametrize("resumed_at", [0, 600])
def test_the_time_left_counts_only_what_is_trained_here(tmp_path, monkeypatch, resumed_at):
    """Two runs of 1,000 steps, one of them resumed; 100 steps of each in 10 seconds."""
    clock = [time.monotonic()]
    monkeypatch.setattr("keyshift.progress.time.monotonic", lambda: clock[0])
    screen = io.StringIO()
    chosen = recipe(seeds=1, variants={"a": {}, "b": {}}, training={**TRAINING, "steps": 1000})
    first, second = plan(chosen, Sources(chosen, None), tmp_path)
    with follow(Console(file=screen, width=200), lambda: False) as hooks:
        hooks.planned([first, second])
        clock[0] += 20  # workers have begun
        hooks.progress(first, Progress(resumed_at, {}))
        hooks.progress(second, Progress(0, {}))
        clock[0] += 11
        hooks.progress(first, Progress(resumed_at + 100, {}))
        hooks.progress(second, Progress(100, {}))
        clock[0] += 31
        hooks.progress(second, Progress(400, {}))
    told = screen.getvalue().strip().splitlines()[-1]
    minutes = 42 / 60 * ((2000 - resumed_at) / 500 - 1)  # that processes began says nothing about steps
    assert "0/2 runs done; b, seed 0, step 400/1000" in told
    assert told.endswith(f"{minutes:.0f} min left")


def begun(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    """A comparison in two processes, once both train and have saved a checkpoint."""
    (folder / "recipe.toml").write_text(text)
    command = [sys.executable, "-m", "keyshift.cli", "compare", "recipe.toml", "--out", "out", "--jobs", "2"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    old = set(folder.glob("out/runs/*/*/checkpoint-*"))
    deadline = time.monotonic() + 120
    while len(set(folder.glob("out/runs/*/*/checkpoint-*")) - old) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def holder(run: Run) -> psutil.Process:
    """The worker that trains a run: it holds the run's lock."""
    (found,) = [
        worker
        for worker in children()
        if any(file.path == str(run.directory / ".lock") for file in worker.open_files())
    ]
    return found


def children() -> list[psutil.Process]:
    """The workers of this process; other tests in it may have left children of other kinds."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if any("keyshift.parallel" in word for word in child.cmdline())]

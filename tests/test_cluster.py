"""Runs as jobs: through submitit's own stand-in for a cluster, which takes the same way as SLURM."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from test_cli import keyshift
from test_compare import TRAINING, corpus, numbers, recipe, text_recipe

from keyshift import cluster
from keyshift.cluster import Cluster
from keyshift.compare import Hooks, compare
from keyshift.errors import UserError
from keyshift.results import RunResult
from keyshift.runs import Run
from keyshift.training import Progress

pytest.importorskip("submitit")

LOCAL = Cluster("local", {"timeout_min": 60})
TWO = {"GQA": {}, "GQA + shift": {"shift": "kv"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(cluster, "POLL", 0.1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_jobs_give_the_numbers_of_one_process_and_only_what_is_missing_is_submitted(tmp_path):
    chosen = text_recipe([str(corpus(tmp_path / "text"))])
    out = tmp_path / "out"
    whole = compare(chosen, out)
    (out / "runs/gqa/seed-0/result.json").unlink()
    (out / "runs/gqa/seed-0/checkpoint-12/optimizer.pt").unlink()  # in the text, an error on its own
    report = compare(chosen, out, resume=True, cluster=LOCAL)
    failed, *others = (variant.runs[0] for variant in report.variants)
    assert [run.status for run in others] == ["finished"] * 2
    assert failed.status == "failed"
    assert "checkpoint-12 cannot be read" in failed.message
    assert len(list((out / "jobs").glob("*_submitted.pkl"))) == 1

    for path in (out / "runs/gqa/seed-0/checkpoint-12").iterdir():
        path.unlink()
    (out / "runs/gqa/seed-0/checkpoint-12").rmdir()
    again = compare(chosen, out, resume=True, cluster=LOCAL)
    assert again.complete
    assert numbers(again) == numbers(whole)


@pytest.mark.slow
def test_a_job_that_is_killed_fails_with_its_log_and_one_that_is_preempted_goes_on(tmp_path):
    """Two jobs at a time: SLURM's early warning for one of them, SIGKILL for the other."""
    chosen = recipe(seeds=1, variants=TWO, training={**TRAINING, "steps": 1500, "save_steps": 5000})
    signals = {"GQA": signal.SIGUSR2, "GQA + shift": signal.SIGKILL}

    def strike(run: Run, progress: Progress) -> None:
        if (number := signals.pop(run.variant.name, None)) is not None:
            holder(run).send_signal(number)

    report = compare(chosen, tmp_path / "out", cluster=LOCAL, hooks=Hooks(progress=strike))
    preempted, killed = (variant.runs[0] for variant in report.variants)
    assert killed.status == "failed"
    log = Path(killed.message.rsplit("log: ", 1)[1])
    assert log.exists()
    assert log.parent == tmp_path / "out/jobs"
    assert preempted.status == "finished"
    logs = [path.read_text() for path in (tmp_path / "out/jobs").glob("*_log.out")]
    assert sum("Calling checkpoint method" in text for text in logs) == 1
    whole = compare(chosen, tmp_path / "whole")
    assert preempted.curve == whole.variants[0].runs[0].curve


def test_a_stop_lets_running_jobs_save_and_cancels_those_that_have_not_begun(tmp_path):
    chosen = recipe(seeds=1, variants=TWO, training={**TRAINING, "steps": 100_000, "save_steps": 100_000})
    begun: list[Run] = []
    results: dict[Run, RunResult] = {}
    before = psutil.Process().children(recursive=True)  # other tests may have left helpers of Python's own
    hooks = Hooks(
        stop=lambda: bool(begun),
        progress=lambda run, progress: begun.append(run),
        finished=lambda run, result: results.update({run: result}),
    )
    report = compare(chosen, tmp_path, cluster=LOCAL, hooks=hooks)
    statuses = [variant.runs[0].status for variant in report.variants]
    assert "interrupted" in statuses
    assert set(statuses) <= {"interrupted", "pending"}
    for run in results:
        assert list(run.directory.glob("checkpoint-*"))
    started = [each for each in psutil.Process().children(recursive=True) if each not in before]
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


@pytest.mark.parametrize(
    ("chosen", "jobs", "message"),
    [
        (Cluster("slrum"), 1, "cluster='slrum' is not known; did you mean 'slurm'"),
        (Cluster("local"), 3, "jobs=3 is for this machine"),
        (Cluster("local", {"nodes": 2}), 1, "nodes=2 must be 1"),
        (Cluster("local", {"queue": "gpu"}), 1, "'queue' need to be prefixed by an executor name"),
        (Cluster("local", {"timeout_min": "long"}), 1, 'timeout_min" expected type'),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, chosen, jobs, message):
    with pytest.raises(UserError, match=message):
        compare(recipe(), tmp_path / "out", jobs=jobs, cluster=chosen)
    assert not (tmp_path / "out/recipe.json").exists()


def test_a_refused_submission_is_one_line(tmp_path, monkeypatch):
    """An sbatch that knows no such partition."""
    refusal = "sbatch: error: invalid partition specified: gpuu"
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{refusal}' >&2; exit 1")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    wanted = Cluster("slurm", {"slurm_partition": "gpuu"})
    with pytest.raises(UserError, match=f"refuses the jobs: {refusal}"):
        compare(recipe(), tmp_path / "out", cluster=wanted)


def test_the_command_line_says_what_is_missing(tmp_path, monkeypatch):
    done = keyshift("compare", "induction", "--cluster-set", "timeout_min=3", cwd=tmp_path)
    assert (done.returncode, "needs --cluster slurm" in done.stderr) == (2, True)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"pip install 'keyshift\[cluster\]'"):
        compare(recipe(), tmp_path / "out", cluster=LOCAL)


def test_a_job_takes_the_cores_it_was_given(monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(cluster.torch, "set_num_threads", taken.append)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "6")
    cluster._use_allocated_cores()  # OMP_NUM_THREADS is set: the user's
    monkeypatch.delenv("OMP_NUM_THREADS")
    cluster._use_allocated_cores()
    monkeypatch.delenv("SLURM_CPUS_ON_NODE")
    cluster._use_allocated_cores()
    assert taken == [6]


def holder(run: Run) -> psutil.Process:
    """The process that trains a run: it holds the run's lock."""
    lock = str((run.directory / ".lock").resolve())
    below = psutil.Process().children(recursive=True)
    (found,) = [each for each in below if any(file.path == lock for file in each.open_files())]
    return found

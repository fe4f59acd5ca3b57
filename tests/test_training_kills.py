"""A run killed at any moment, of saving above all, goes on from a whole checkpoint and ends as if nothing had
been."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_training import SETTINGS, SOURCE, equal_weights, model

from keyshift import KeyshiftForCausalLM
from keyshift.training import newest_checkpoint, step_of, train
from keyshift.training.checkpoints import check_readable

TESTS = Path(__file__).parent


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_loses_nothing_that_was_saved(tmp_path, kills):
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(TESTS / "nursery.py"), str(tmp_path / "killed")]
    draw, moments, step = random.Random(0), set(), 0
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as nursery:
        for _ in range(kills):
            pid = begin(nursery, last=0)
            wait_for_progress(tmp_path / "killed", step)
            time.sleep(draw.uniform(0, 0.15))
            moments.add(what_is_there(tmp_path / "killed"))
            os.kill(pid, signal.SIGKILL)
            assert nursery.stdout.readline().strip() == str(int(signal.SIGKILL))
            step = check_whole(tmp_path / "killed", at_least=step)
        begin(nursery, last=step + 5)
        assert nursery.stdout.readline().strip() == "0"
        nursery.stdin.close()
    check_whole(tmp_path / "killed", at_least=step + 5)
    settings = SETTINGS.model_copy(
        update={"steps": 10_000, "save_steps": 10_000, "eval_steps": 10_000, "eval_batches": 1}
    )
    straight, taken = model(), []
    train(
        straight,
        SOURCE,
        settings,
        tmp_path / "straight",
        seed=0,
        stop=lambda: len(taken) >= step + 5,
        on_progress=lambda standing: taken.append(standing.step),
    )
    kept = newest_checkpoint(tmp_path / "killed")
    assert step_of(kept) == step + 5
    assert equal_weights(KeyshiftForCausalLM.from_pretrained(kept), straight)
    assert len(moments) > 1  # some were killed while a checkpoint was written


def begin(nursery: subprocess.Popen, last: int) -> int:
    nursery.stdin.write(f"{last}\n")
    nursery.stdin.flush()
    return int(nursery.stdout.readline())


def wait_for_progress(directory: Path, step: int) -> None:
    """Until something was saved after ``step``: a kill before that is a kill of nothing."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        kept = newest_checkpoint(directory)
        if kept is not None and step_of(kept) > step:
            return
        time.sleep(0.002)
    raise AssertionError(f"no checkpoint after step {step} in {directory}")


def what_is_there(directory: Path) -> tuple[bool, ...]:
    return tuple(bool(list(directory.glob(pattern))) for pattern in (".saving/*", ".saving/*/*.pt", ".old-*"))


def check_whole(directory: Path, at_least: int) -> int:
    kept = newest_checkpoint(directory)
    assert kept is not None
    check_readable(kept)
    loaded = KeyshiftForCausalLM.from_pretrained(kept)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in loaded.parameters())
    assert json.loads((kept / "trainer_state.json").read_text())["global_step"] == step_of(kept)
    assert step_of(kept) >= at_least
    return step_of(kept)

"""Two gloo processes train what one trains: DDP and FSDP2, resumed, stopped, and told apart from one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import together
import torch
from safetensors.torch import load_file

from keyshift import KeyshiftForCausalLM
from keyshift.recipe import Engine

PARALLEL = ("ddp", "fsdp")

pytestmark = pytest.mark.xdist_group("processes")  # torchrun starts once for all of them


def torchrun(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(processes), *arguments], capture_output=True, text=True, env=environment
    )
    return done


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """What two processes trained."""
    out = tmp_path_factory.mktemp("both")
    together.teacher(out)
    done = torchrun(together.__file__, str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def report(both) -> dict:
    return json.loads((both / "together.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint-6" / "model.safetensors")


def losses(history: list[dict], *keys: str) -> list[float]:
    found = [entry[key] for entry in history for key in keys if key in entry]
    assert found
    return found


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("mechanism", together.MECHANISMS)
@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_train_what_one_trains(both, report, tmp_path, parallel, mechanism):
    alone = together.run(tmp_path, mechanism, "ddp")
    shared = report["histories"][f"{parallel}-{mechanism}"]
    keys = ("eval_loss", "eval_accuracy", "probe_induction", "probe_previous_token")
    assert losses(shared, *keys) == pytest.approx(losses(alone, *keys), abs=1e-5)
    assert_close(weights(both / f"{parallel}-{mechanism}"), weights(tmp_path), 1e-5)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_accumulating_micro_batches_changes_nothing(both, parallel):
    assert_close(weights(both / f"{parallel}-micro"), weights(both / f"{parallel}-gva"), 1e-5)


@pytest.mark.parametrize("micro", [1, 2])
def test_one_process_accumulates_to_the_same_step(tmp_path, micro):
    whole = together.run(tmp_path / "whole", "gva", "ddp")
    parts = together.run(tmp_path / "parts", "gva", "ddp", micro_batch_size=micro)
    assert losses(parts, "eval_loss") == pytest.approx(losses(whole, "eval_loss"), abs=1e-6)
    assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), 1e-6)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_signal_to_one_process_stops_all_and_the_run_goes_on_bit_by_bit(both, parallel):
    straight, parts = weights(both / f"{parallel}-gva"), weights(both / f"{parallel}-parts")
    assert all(torch.equal(tensor, parts[name]) for name, tensor in straight.items())


@pytest.mark.parametrize("parallel", PARALLEL)
def test_adaptive_clipping_goes_by_the_norm_of_all_processes(both, report, tmp_path, parallel):
    zclip = together.SETTINGS.model_copy(update={"clipping": "zclip", "spike_zscore": 6.0})
    together.run(tmp_path, "gva", "ddp", zclip)
    alone, shared = (
        json.loads((folder / "checkpoint-6/keyshift_state.json").read_text())["guard"]
        for folder in (tmp_path, both / f"{parallel}-zclip")
    )
    assert shared["clipper"]["first"] == pytest.approx(alone["clipper"]["first"], rel=1e-4)
    assert shared["losses"]["first"] == pytest.approx(alone["losses"]["first"], rel=1e-5)
    assert len(alone["losses"]["first"]) == 6


@pytest.mark.parametrize("parallel", PARALLEL)
def test_two_processes_learn_from_a_teacher_what_one_learns(both, report, tmp_path, parallel):
    """Replicas of micro-batches, and shares of a model."""
    alone = together.run(tmp_path, "gva", "ddp", together.teacher(both))
    shared = report["histories"][f"{parallel}-taught"]
    keys = ("loss", "kl", "attention_error", "label_loss", "eval_loss")
    assert losses(shared, *keys) == pytest.approx(losses(alone, *keys), abs=1e-5)
    assert_close(weights(both / f"{parallel}-taught"), weights(tmp_path), 1e-5)


@pytest.mark.parametrize("parallel", PARALLEL)
def test_checkpoints_of_several_processes_are_ordinary_ones(both, parallel):
    folder = both / f"{parallel}-tied" / "checkpoint-6"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["KeyshiftForCausalLM"]
    kept = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in kept or "model.embed_tokens.weight" not in kept
    loaded = KeyshiftForCausalLM.from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = torch.arange(10)[None]
    assert torch.isfinite(loaded(ids).logits).all()


def test_every_line_of_metrics_is_written_once(both):
    for folder in both.glob("*-gva"):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
        probes = [json.loads(line) for line in (folder / "probes.jsonl").read_text().splitlines()]
        assert [probe["step"] for probe in probes] == [0, 3, 6]
        assert len(probes[0]["heads"]) == 4


def test_what_cannot_be_shared_out_is_said(report):
    messages = report["messages"]
    assert messages["processes"].startswith("UserError: engine.processes=3, but 2 train together")
    assert messages["micro"].startswith("UserError: engine.micro_batch_size=3 does not divide the 2 rows")
    assert messages["resumed otherwise"].startswith("UserError: engine.parallel='fsdp'")


def test_fsdp_of_one_process_is_refused(tmp_path):
    assert together.refused(parallel="fsdp").startswith("UserError: engine.parallel='fsdp' needs several")
    assert together.refused(processes=2).startswith("UserError: engine.processes=2, but 1 train together")
    assert Engine().parallel == "ddp"


def test_a_batch_that_processes_cannot_share_evenly_is_refused(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(together.__file__).parent)!r})\n"
        "import together\n"
        "together.SETTINGS = together.SETTINGS.model_copy(update={'batch_size': 3})\n"
        "print(together.refused())\n"
    )
    done = torchrun(str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("UserError: training.batch_size=3 cannot be shared out evenly over 2") == 2

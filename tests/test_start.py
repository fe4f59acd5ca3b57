"""Training from a checkpoint: the same model goes on, all of it or α and β alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_process
from safetensors.torch import load_file
from test_train_command import RECIPE, WORDS
from texts import write_jsonl

from keyshift.convert import convert, plan
from keyshift.data import FileSource, prepare
from keyshift.errors import UserError
from keyshift.pretrain import Watching, pretrain
from keyshift.recipe import Recipe, load_recipe
from keyshift.runs import Run
from keyshift.training import newest_checkpoint


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a small GQA model trained on it, and the same with a shift put in."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "small.toml").write_text(RECIPE.partition('[variants."GVA')[0])
    lines = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 90)) + f" {n}" for n in range(80)]
    write_jsonl(folder / "text.jsonl", lines)
    options: dict[str, Any] = {"vocab_size": 300, "validation_fraction": 0.3, "end_token": True}
    prepare(FileSource([folder / "text.jsonl"]), folder / "store", tokenizer=None, **options)
    run, _ = pretrain(recipe(folder, **{"training.learning_rate": 0.01}), folder / "trained", variant="GQA")
    convert(plan(str(newest_checkpoint(run.directory))), folder / "plain")
    convert(plan(str(folder / "plain"), shift="kv"), folder / "shifted")
    return folder


def recipe(place: Path, **overrides: Any) -> Recipe:
    return load_recipe(str(place / "small.toml"), {"data.paths": [str(place / "store")], **overrides})


SHIFTED = {"model.shift": "kv", "training.eval_steps": 12, "training.steps": 24}


def trained(place: Path, out: Path, start: str = "shifted", **overrides: Any) -> tuple[Run, list[float]]:
    """The run from a checkpoint and its held-out losses."""
    chosen = recipe(place, **{**SHIFTED, "training.start_from": str(place / start), **overrides})
    run, result = pretrain(chosen, out, variant="GQA")
    return run, [point.loss for point in result.curve]


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(run.directory) / "model.safetensors")


def held_out(place: Path, out: Path, start: str) -> float:
    """The loss of a checkpoint as it is: one step at a rate of nearly nothing."""
    still = {"training.learning_rate": 1e-12, "training.steps": 1, "training.weight_decay": 0.0}
    shift = "none" if start == "plain" else "kv"
    _, losses = trained(place, out, start, **{**still, "model.shift": shift})
    return losses[-1]


def test_training_goes_on_from_the_loss_of_the_checkpoint(place: Path, tmp_path: Path) -> None:
    plain, shifted = (held_out(place, tmp_path / each, each) for each in ("plain", "shifted"))
    assert shifted == pytest.approx(plain, rel=1e-6)
    run, losses = trained(place, tmp_path / "on", **{"training.learning_rate": 3e-3})
    assert losses[-1] < plain - 0.05
    start, end = load_file(place / "shifted/model.safetensors"), weights_of(run)
    assert start.keys() == end.keys()
    assert not any(torch.equal(start[name], end[name]) for name in start)


def test_alpha_and_beta_alone_move_and_the_loss_gets_no_worse(place: Path, tmp_path: Path) -> None:
    alone = {"training.trained": "shift", "training.learning_rate": 0.03, "training.weight_decay": 0.0}
    run, losses = trained(place, tmp_path, **alone)
    start, end = load_file(place / "shifted/model.safetensors"), weights_of(run)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {name for name in start if "_shift." in name}
    assert max(float((end[name] - start[name]).abs().max()) for name in moved) > 0.05
    assert losses[-1] < held_out(place, tmp_path / "before", "shifted")


def test_stopped_and_gone_on_with_it_ends_as_if_nothing_had_been(place: Path, tmp_path: Path) -> None:
    alone = {"training.trained": "shift", "training.start_from": str(place / "shifted"), **SHIFTED}
    chosen = recipe(place, **alone)
    seen: list[int] = []
    stop_at_seven = Watching(
        stop=lambda: len(seen) >= 7, progress=lambda standing: seen.append(standing.step)
    )
    pretrain(chosen, tmp_path / "parts", variant="GQA", watching=stop_at_seven)
    parts, resumed = pretrain(chosen, tmp_path / "parts", variant="GQA", resume=True)
    whole, straight = pretrain(chosen, tmp_path / "whole", variant="GQA")
    assert resumed.curve == straight.curve
    ends = weights_of(parts), weights_of(whole)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_what_it_takes_counts_only_weights_that_move(place: Path) -> None:
    from keyshift.pretrain import dry_run

    rows = [
        dry_run(recipe(place, **SHIFTED, **{"training.trained": trained}), "GQA")[0]
        for trained in ("all", "shift")
    ]
    assert rows[0]["optimizer_bytes"] == 2 * 4 * rows[0]["parameters"]
    assert rows[1]["optimizer_bytes"] == 2 * 4 * rows[1]["shift_parameters"]
    assert rows[0]["weights_bytes"] == rows[1]["weights_bytes"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"training.start_from": "nowhere/"}, "no model configuration at"),
        ({"training.start_from": "llama"}, "is a llama model; keyshift convert makes a keyshift model of it"),
        ({"model.hidden_size": 32}, "hidden_size=32, but the checkpoint of training.start_from="),
        (
            {"training.start_from": "plain", "model.shift": "none", "training.trained": "shift"},
            "training.trained='shift', but the model has no shift; use 'all'",
        ),
        ({"data.sequence_length": 64}, "max_position_embeddings=32 is below sequence_length=64"),
        ({"equal_parameters": "two", "variants": {"GQA": {}, "two": {}}}, "which starts from a checkpoint"),
        ({"data.paths": ["other"]}, "another tokenizer than that of training.start_from="),
        ({"data.paths": ["larger"]}, "tokens and the checkpoint of training.start_from="),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_one_line(
    overrides: dict[str, Any], message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaConfig

    monkeypatch.chdir(place)
    if not Path("llama").exists():
        LlamaConfig().save_pretrained("llama")
        write_jsonl(Path("letters.jsonl"), [f"{n} other letters {n * n} " * 40 for n in range(200)])
        options: dict[str, Any] = {"validation_fraction": 0.3, "end_token": True, "tokenizer": None}
        prepare(FileSource(["letters.jsonl"]), "other", vocab_size=290, **options)
        prepare(FileSource(["letters.jsonl"]), "larger", vocab_size=400, **options)
    chosen = recipe(place, **{**SHIFTED, "training.start_from": "shifted", **overrides})
    with pytest.raises(UserError) as caught:
        pretrain(chosen, tmp_path / "out", variant="GQA")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_of_the_docs_does_both(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "store", tmp_path / "store")
    shutil.copytree(place / "shifted", tmp_path / "shifted")
    cut = ["training.steps=2", "training.batch_size=4", "training.eval_batches=1", "data.sequence_length=32"]
    for variant in ("all weights", "α and β alone"):
        done = in_process("train", "adopt", "store", "--variant", variant, *cut, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

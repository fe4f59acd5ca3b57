"""``keyshift train`` as a user meets it: alone or under torchrun, stopped, gone on with, compared."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import in_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from keyshift.compare import compare
from keyshift.corpus import text_of
from keyshift.data import FileSource, prepare
from keyshift.errors import UserError
from keyshift.pretrain import Watching, choose, pretrain
from keyshift.recipe import load_recipe
from keyshift.runs import Sources, execute, known
from keyshift.training import newest_checkpoint

SENTENCE = "the key of a token before it is mixed into that of the token and so it is with values"
WORDS = SENTENCE.split()

RECIPE = """
title = "small"
seeds = 1
[data]
vocab_size = 300
sequence_length = 32
validation_fraction = 0.3
[training]
steps = 12
batch_size = 4
eval_steps = 6
eval_batches = 2
save_steps = 100
probe_steps = 6
[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
tie_word_embeddings = true
[variants.GQA]
[variants."GVA + shift"]
attention = "gva"
position = "decoupled_rope"
qk_rope_head_dim = 4
shift = "kv"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a recipe and some text, raw and prepared in two stores of one tokenizer."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "small.toml").write_text(RECIPE)
    texts = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 90)) + f" {n}" for n in range(80)]
    for name, half in (("a", texts[::2]), ("b", texts[1::2])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in half))
    options = {"vocab_size": 300, "validation_fraction": 0.3, "end_token": True}
    prepare(FileSource([folder / "a.jsonl"]), folder / "store-a", tokenizer=None, **options)
    tokenizer = str(folder / "store-a" / "tokenizer")
    prepare(FileSource([folder / "b.jsonl"]), folder / "store-b", tokenizer=tokenizer, **options)
    return folder


def keyshift(
    place: Path, *arguments: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "keyshift.cli", *arguments]
    environment = {**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment)


TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def recipe(place: Path, **overrides):
    return load_recipe(str(place / "small.toml"), {"data.paths": [str(place / "store-a")], **overrides})


def test_a_run_by_itself_is_what_compare_would_have_trained(place, tmp_path):
    """So that several machines can make one comparison."""
    run, result = pretrain(recipe(place), tmp_path / "alone", variant="GVA + shift")
    assert result.status == "finished"
    assert known(run) == result
    report = compare(recipe(place), tmp_path / "alone", resume=True)
    assert report.complete
    whole = compare(recipe(place), tmp_path / "whole")
    for ours, theirs in zip(report.variants, whole.variants, strict=True):
        assert ours.runs[0].curve == theirs.runs[0].curve
    shifted = next(variant for variant in report.variants if variant.name == "GVA + shift")
    assert [step for step, _ in shifted.runs[0].induction] == [0, 6, 12]


def test_a_checkpoint_is_a_model_with_its_tokenizer(place, tmp_path):
    run, _ = pretrain(recipe(place), tmp_path, variant="GQA")
    checkpoint = newest_checkpoint(run.directory)
    model, tokenizer = (kind.from_pretrained(checkpoint) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    prompt = tokenizer(tokenizer.bos_token + "the key", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=5).shape[1] > prompt["input_ids"].shape[1]


def test_stopped_and_gone_on_with_it_ends_bit_by_bit_as_if_nothing_had_been(place, tmp_path):
    asked = iter([False] * 4 + [True])
    watching = Watching(stop=lambda: next(asked))
    run, result = pretrain(recipe(place), tmp_path / "parts", variant="GQA", watching=watching)
    assert (result.status, result.steps) == ("interrupted", 5)
    with pytest.raises(UserError, match="holds this run already; pass --resume auto"):
        pretrain(recipe(place), tmp_path / "parts", variant="GQA")
    _, resumed = pretrain(recipe(place), tmp_path / "parts", variant="GQA", resume=True)
    _, whole = pretrain(recipe(place), tmp_path / "whole", variant="GQA")
    assert resumed.curve == whole.curve
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [6, 12]


def test_a_folder_of_another_recipe_is_refused_with_the_difference(place, tmp_path):
    pretrain(recipe(place), tmp_path, variant="GQA")
    other = recipe(place, **{"training.learning_rate": 0.5, "model.hidden_size": 32})
    with pytest.raises(
        UserError, match=r"training.learning_rate was 0.001, is 0.5; model.hidden_size was 16"
    ):
        pretrain(other, tmp_path, variant="GQA", resume=True)
    faster = recipe(place, **{"engine.micro_batch_size": 1})  # how it is computed may change
    assert pretrain(faster, tmp_path, variant="GQA", resume=True)[1].status == "finished"


def test_a_variant_has_to_be_chosen_where_there_are_several(place):
    with pytest.raises(UserError, match=r"has 2 variants; choose one with --variant: 'GQA', 'GVA . shift'"):
        choose(recipe(place), None)
    with pytest.raises(UserError, match="did you mean 'GQA'"):
        choose(recipe(place), "GQ")


def test_stores_are_mixed_and_validated_one_by_one(place, tmp_path):
    stores = {str(place / "store-a"): 3.0, str(place / "store-b"): 1.0}
    mixed = load_recipe(str(place / "small.toml"), {"data.mixture": stores})
    run, result = pretrain(mixed, tmp_path, variant="GQA")
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "eval_loss" in line][-1]
    parts = last["eval_loss/store-a"], last["eval_loss/store-b"]
    assert last["eval_loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1])
    assert result.curve[-1].loss == last["eval_loss"]


def test_a_corrupt_shard_is_named_before_training(place, tmp_path):
    shutil.copytree(place / "store-a", tmp_path / "store")
    shard = tmp_path / "store/00000.train.tokens"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    overrides = {"data.paths": [str(tmp_path / "store")]}
    with pytest.raises(UserError, match=r"00000\.train\.tokens: corrupt, its checksum differs"):
        pretrain(load_recipe(str(place / "small.toml"), overrides), tmp_path / "out", variant="GQA")
    assert not (tmp_path / "out/runs").exists()


def test_text_that_was_made_anew_is_noticed_before_a_run_goes_on(place, tmp_path):
    """Raw text or a store, another tokenizer or the same: the old weights do not fit the new ids."""
    for kind in ("raw", "store"):
        text, out = tmp_path / f"{kind}.jsonl", tmp_path / f"{kind}-out"
        lines = (place / "a.jsonl").read_text()
        text.write_text(lines)
        store = tmp_path / "store"
        paths = [str(text if kind == "raw" else store)]
        options = {"tokenizer": None, "vocab_size": 300, "validation_fraction": 0.3}
        if kind == "store":
            prepare(FileSource([text]), store, **options)
        chosen = load_recipe(str(place / "small.toml"), {"data.paths": paths})
        asked = iter([False] * 4 + [True])
        pretrain(chosen, out, variant="GQA", watching=Watching(stop=lambda asked=asked: next(asked)))
        text.write_text(lines + json.dumps({"text": "another document that was not there " * 9}) + "\n")
        if kind == "store":
            prepare(FileSource([text]), store, **options)
        with pytest.raises(UserError, match="other text"):
            pretrain(chosen, out, variant="GQA", resume=True)
        with pytest.raises(UserError, match="other text") if kind == "raw" else nullcontext():
            pretrain(chosen, out, variant="GVA + shift")


def test_a_run_that_another_process_finished_meanwhile_is_left_alone(place, tmp_path):
    """It is looked at once more when the folder is free: a second training would delete its checkpoint."""
    run, first = pretrain(recipe(place), tmp_path, variant="GQA")
    sources = Sources(recipe(place), text_of(recipe(place), tmp_path))
    again = execute(run, sources, resume=False, stop=lambda: False, on_progress=lambda progress: None)
    assert again == first
    (run.directory / "result.json").unlink()
    with pytest.raises(UserError, match="holds this run already"):
        execute(run, sources, resume=False, stop=lambda: False, on_progress=lambda progress: None)
    assert newest_checkpoint(run.directory).name == "checkpoint-12"


def test_a_mistake_leaves_the_folder_for_the_right_command(place, tmp_path):
    with pytest.raises(UserError):
        pretrain(load_recipe(str(place / "small.toml"), {"data.paths": ["nowhere"]}), tmp_path, variant="GQA")
    with pytest.raises(UserError):
        pretrain(recipe(place, **{"model.num_attention_heads": 3}), tmp_path, variant="GQA")
    assert pretrain(recipe(place), tmp_path, variant="GQA")[1].status == "finished"


def test_a_run_that_was_accurate_enough_does_not_go_on(tmp_path):
    overrides = {"training.until_accuracy": 0.05, "training.steps": 75, "training.eval_steps": 25}
    chosen = load_recipe("induction", overrides)
    run, result = pretrain(chosen, tmp_path, variant="1-layer GVA + shift")
    assert result.steps == 25
    (run.directory / "result.json").unlink()
    _, again = pretrain(chosen, tmp_path, variant="1-layer GVA + shift", resume=True)
    assert (again.status, again.steps, again.curve) == ("finished", 25, result.curve)


def test_what_a_prepared_store_cannot_be_is_refused(place, tmp_path):
    options = {"tokenizer": None, "vocab_size": 290, "validation_fraction": 0.3}
    prepare(FileSource([place / "b.jsonl"]), tmp_path / "b", **options)
    tokenizer = str(tmp_path / "b/tokenizer")
    with pytest.raises(UserError, match="is not the tokenizer of"):
        pretrain(recipe(place, **{"data.tokenizer": tokenizer}), tmp_path / "out", variant="GQA")
    streamed = {"data.tokenizer": tokenizer, "data.stream": True}
    with pytest.raises(UserError, match="is prepared: leave it out"):
        pretrain(recipe(place, **streamed), tmp_path / "out", variant="GQA")


def test_rates_in_metrics_are_those_that_were_used(place, tmp_path):
    overrides = {"training.schedule": "linear", "training.steps": 20, "training.learning_rate": 1.0}
    overrides |= {"training.max_grad_norm": 1e-9, "training.shift_learning_rate": 1.0}
    run, _ = pretrain(recipe(place, **overrides), tmp_path, variant="GQA")
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}
    assert rates == pytest.approx({1: 1.0, 10: 1 - 9 / 20, 20: 1 - 19 / 20})


def test_files_of_a_checkpoint_are_as_readable_as_each_other(place, tmp_path):
    run, _ = pretrain(recipe(place), tmp_path, variant="GQA")
    files = [path for path in newest_checkpoint(run.directory).rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1


def test_a_stream_goes_on_where_it_was(place, tmp_path):
    overrides = {
        "data.paths": [str(place / "a.jsonl")],
        "data.stream": True,
        "data.tokenizer": str(place / "store-a" / "tokenizer"),
    }
    streamed = load_recipe(str(place / "small.toml"), overrides)
    _, whole = pretrain(streamed, tmp_path / "whole", variant="GQA")
    asked = iter([False] * 6 + [True])
    watching = Watching(stop=lambda: next(asked))
    run, _ = pretrain(streamed, tmp_path / "parts", variant="GQA", watching=watching)
    assert json.loads((newest_checkpoint(run.directory) / "keyshift_state.json").read_text())["source"]
    _, parts = pretrain(streamed, tmp_path / "parts", variant="GQA", resume=True)
    assert parts.curve == whole.curve
    with pytest.raises(UserError, match=r"data\.stream is for one run"):
        compare(streamed, tmp_path / "compared")


def test_the_command_says_how_it_ended_within_80_columns(place):
    arguments = ("train", "small.toml", "a.jsonl", "training.steps=6", "--variant", "GQA", "--out", "raw")
    done = keyshift(place, *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("GQA, seed 0: 7,920 parameters, 1 process")
    assert lines[1] == "GQA, seed 0: finished after 6 steps"
    assert re.match(r"held-out loss \d\.\d{4} nats per token, \d\.\d{4} bits per byte", lines[2])
    assert lines[-1] == "checkpoint: raw/runs/gqa/seed-0/checkpoint-6"
    assert max(map(len, lines)) <= 80
    assert json.loads((place / "raw/recipe.json").read_text())["training"]["steps"] == 6
    again = in_process(*arguments, "--resume", "auto", "--json", cwd=place)
    assert json.loads(again.stdout)["status"] == "finished"
    refused = in_process(*arguments, cwd=place)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_under_torchrun_one_process_speaks_and_the_run_is_the_same(place, tmp_path):
    arguments = ("train", "small.toml", "store-a", "--variant", "GVA + shift", "--json", "--out")
    both = keyshift(place, *arguments, str(tmp_path / "two"), launcher=TWO)
    assert both.returncode == 0, both.stderr
    alone = keyshift(place, *arguments, str(tmp_path / "one"))
    losses = [[point["loss"] for point in json.loads(done.stdout)["curve"]] for done in (both, alone)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_goes_on(place, tmp_path, number):
    command = [sys.executable, "-m", "keyshift.cli", "train", "small.toml", "store-a", "--variant", "GQA"]
    command += ["training.steps=100000", "training.eval_steps=100000", "--out", str(tmp_path)]
    metrics = tmp_path / "runs/gqa/seed-0/metrics.jsonl"
    with subprocess.Popen(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped early; the same command with --resume auto goes on" in output
    assert newest_checkpoint(metrics.parent) is not None


def test_trackers_get_what_is_logged_and_need_no_network(place, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = ("tensorboard", "trackio", "wandb")
    for name in names:
        pytest.importorskip(name)
    command = [sys.executable, "-m", "keyshift.cli", "train", "small.toml", "store-a", "--variant", "GQA"]
    command += ["--out", str(tmp_path / "out"), *(f"--track={name}" for name in names)]
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(
        command,
        cwd=place,
        capture_output=True,
        text=True,
        env={**os.environ, **offline, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "out/runs/gqa/seed-0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("eval/loss")] == pytest.approx(losses)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert list((tmp_path / "trackio").glob("keyshift*"))


def test_what_it_would_take_is_said_without_text_or_files():
    code, printed, _ = in_process("train", "pretrain/350m", "--dry-run", "--json")
    assert code == 0
    rows = {row["variant"]: row for row in json.loads(printed)}
    assert 0.9 < rows["GQA"]["parameters"] / 355e6 < 1.1
    assert rows["GQA"]["shift_parameters"] == 0
    assert rows["GQA + KV shift"]["shift_parameters"] == 24 * 4 * 4  # four numbers per layer and head
    assert rows["GVA"]["cache_bytes_per_token"] / rows["GQA"]["cache_bytes_per_token"] == pytest.approx(
        0.53125
    )


def test_text_that_is_not_there_is_missed_by_a_dry_run_too():
    code, _, errors = in_process("train", "pretrain/base", "no-store", "--dry-run")
    assert code == 2
    assert "'no-store': no such file or folder" in errors


@pytest.mark.parametrize("setting", [[], ["engine.gradient_checkpointing=true"]])
def test_what_it_would_take_fits_80_columns(setting):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        code, printed, _ = in_process("train", "induction", "--dry-run", *setting)
    assert code == 0
    assert max(map(len, printed.splitlines())) <= 80
    assert "1-layer GVA" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small.toml", "--variant", "GQA"], "no text to read"),
        (["small.toml", "store-a", "--resume", "yes"], "--resume 'yes' is not known; use --resume auto"),
        (["small.toml", "store-a", "--variant", "GQA", "--seed", "-1"], "seed=-1 must be at least 0"),
        (["small.toml", "store-a", "store-b", "--variant", "GQA"], "give data.mixture the share of each"),
        (
            ["small.toml", "store-a", "--variant", "GQA", "training.batch_size=5000"],
            "too little prepared text",
        ),
        (["small.toml", "store-a", "--variant", "GQA", "engine.processes=2"], "but 1 train together"),
        (
            ["small.toml", "store-a", "--variant", "GQA", "engine.micro_batch_size=3"],
            "does not divide the 4 rows",
        ),
        (["small.toml", "store-a", "--variant", "GQA", "--track", "tensorbord"], "use some of tensorboard"),
        (
            ["small.toml", "store-a", "--variant", "GQA", "model.max_position_embeddings=16"],
            "max_position_embeddings=16 is below sequence_length=32",
        ),
        (["small.toml", "a.jsonl", "--variant", "GQA", "data.stream=true"], "needs data.tokenizer"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(place, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    code, printed, said = in_process("train", *arguments, "--out", str(tmp_path / "out"))
    assert code == 2
    assert not printed
    assert message in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1

"""The hub: cards, what goes and what does not, uploads to a server, and loading where keyshift is not."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import in_process
from hub_server import READER, TOKEN, Hub, running_hub
from safetensors.torch import load_file, save_file
from texts import fails, write_jsonl
from tiny import build, case, full, tokens
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import keyshift
from keyshift import KeyshiftCache, KeyshiftConfig, KeyshiftForCausalLM
from keyshift.convert.files import INDEX, WEIGHTS
from keyshift.evaluation.report import summary
from keyshift.evaluation.results import EvalReport, Score
from keyshift.hub import model_card, plan_upload
from keyshift.hub.card import TRANSFORMERS, is_untouched
from keyshift.hub.carried import AUTO_MAP, carried_files
from keyshift.hub.trained import trained
from keyshift.pretrain import pretrain
from keyshift.recipe import Recipe
from keyshift.runs import Run

CASES = {
    "gqa-shift": case("gqa", "rope", "kv"),
    "gva": case("gva", "decoupled_rope", "none"),
    "gva-shift": case("gva", "decoupled_rope", "kv"),
    "mla": case("mla", "decoupled_rope", "none"),
}
IDS = tokens(2, 9)
NEW = 8
Said = dict[str, tuple[int, str, str]]
"""Exit code, output and errors of commands, by name."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def run(root: Path) -> Run:
    """A real run of two steps on text: its folder is as ``keyshift train`` leaves it."""
    text = write_jsonl(
        root / "texts.jsonl", [f"Story {n} is about {n * n % 97} tokens. " * 20 for n in range(99)]
    )
    recipe = Recipe.model_validate(
        {
            "title": "Two steps",
            "data": {"paths": [str(text)], "sequence_length": 64, "vocab_size": 300},
            "training": {"steps": 2, "batch_size": 2, "eval_steps": 1, "eval_batches": 1, "warmup_steps": 1},
            "model": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "variants": {"GVA, shifted": {"attention": "gva", "position": "decoupled_rope", "shift": "kv"}},
        }
    )
    planned, result = pretrain(recipe, root / "out", seed=1)
    assert result.status == "finished"
    return planned


@pytest.fixture
def checkpoint(run: Run, tmp_path: Path) -> Path:
    """A copy of its checkpoint, with the training's state in it, apart from the run."""
    return shutil.copytree(run.directory / "checkpoint-2", tmp_path / "checkpoint-2")


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def table(card: str) -> dict[str, str]:
    """The rows of two cells."""
    rows = (line.strip("|").split("|") for line in card.splitlines() if line.startswith("| "))
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}


# The card


def test_the_card_of_a_run_says_what_it_is_and_what_was_measured(run: Run) -> None:
    card = model_card(run.directory / "checkpoint-2", repo="me/tiny")
    result = json.loads((run.directory / "result.json").read_text())
    config = KeyshiftConfig.from_pretrained(run.directory / "checkpoint-2")
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["keyshift", "gva", "kv-shifting"],
    }
    rows = table(card)
    model = KeyshiftForCausalLM.from_pretrained(run.directory / "checkpoint-2", dtype=torch.bfloat16)
    cache = KeyshiftCache(config)
    with torch.no_grad():
        model(tokens(1, 64), past_key_values=cache, use_cache=True)
    measured = sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values)) // 64
    grouped = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert rows["cache"].startswith(
        f"{measured} bytes per token in bfloat16; GQA with these heads: {grouped} "
    )
    assert rows["parameters"] == f"{sum(each.numel() for each in model.parameters()):,}"
    last = result["curve"][-1]
    assert rows["loss, nats per predicted token"] == f"{last['loss']:.4f}"
    assert rows["perplexity"] == f"{math.exp(last['loss']):.3f}"
    assert rows["bits per byte"] == f"{last['bits_per_byte']:.4f}"
    assert "- recipe “Two steps”, variant “GVA, shifted”, seed 1\n" in card
    assert f"- 2 optimiser steps of 2 sequences, {last['tokens']} tokens\n" in card
    assert "AdamW, learning rate 0.001 (constant after a warm-up of 1 steps), weight decay 0.1\n" in card
    assert 'from_pretrained("me/tiny", trust_remote_code=True)' in card
    assert str(run.directory.parents[2]) not in card


def test_a_healed_model_says_so_and_not_where_its_teacher_lay(run: Run, tmp_path: Path) -> None:
    out = shutil.copytree(run.directory.parents[2], tmp_path / "out")
    recipe = json.loads((out / "recipe.json").read_text())
    taught = recipe["training"] | {"distil_from": "/home/me/teacher", "distil_labels": 0.5}
    (out / "recipe.json").write_text(json.dumps(recipe | {"training": taught}))
    checkpoint = out / "runs" / run.directory.parent.name / "seed-1" / "checkpoint-2"
    card = model_card(checkpoint)
    parts = "KL of logits × 1, error of attention outputs × 1, cross-entropy of labels × 0.5"
    assert f"- distilled from a teacher: {parts}\n" in card
    assert "/home/me" not in card
    assert "distilled" not in model_card(run.directory / "checkpoint-2")


def test_what_is_not_known_is_left_out(checkpoint: Path) -> None:
    assert "seed" not in model_card(checkpoint)  # apart from its run
    assert "optimiser steps" in model_card(checkpoint)
    (checkpoint / "trainer_state.json").unlink()
    card = model_card(checkpoint, remote_code=False)
    assert trained(checkpoint) is None
    assert "## Training" not in card
    assert "## Measured" not in card
    assert "trust_remote_code" not in card
    assert front_matter(card)["library_name"] == "keyshift"


def test_numbers_of_another_step_are_not_those_of_these_weights(checkpoint: Path) -> None:
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "global_step": 7}))
    card = model_card(checkpoint)
    assert "7 optimiser steps" in card
    assert "## Measured" not in card


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("\n          Apache License\n    Version 2.0, January 2004\n", "apache-2.0"),
        ("MIT License\n\nCopyright", "mit"),
        ("Only on Sundays.", None),
    ],
)
def test_a_licence_is_named_where_it_is_known(checkpoint: Path, text: str, name: str | None) -> None:
    (checkpoint / "LICENSE").write_text(text)
    assert front_matter(model_card(checkpoint)).get("license") == name
    assert "LICENSE" in plan_upload(checkpoint, "me/tiny").sizes()


def score(checkpoint: object, **changes: Any) -> Score:
    fields = {"model": "tiny", "checkpoint": str(checkpoint), "task": "icl", "shots": 5, "metric": "acc"}
    return Score(**{**fields, "value": 0.625, "error": 0.125, "questions": 16, **changes})


def report(*scores: Score) -> EvalReport:
    models = {"tiny": list(dict.fromkeys(each.checkpoint for each in scores))}
    about = {
        "command": "keyshift eval",
        "created": "2026-01-01",
        "environment": {},
        "settings": {},
        "answers": {},
    }
    return EvalReport(**about, models=models, scores=list(scores))


def test_results_of_this_checkpoint_go_into_the_card(checkpoint: Path, tmp_path: Path) -> None:
    made = report(score(checkpoint), score(checkpoint, part_of="all", task="part"), score("other", value=0.5))
    files = {"eval.json": made.model_dump_json(), "printed.json": json.dumps(summary(made))}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        card = plan_upload(checkpoint, "me/tiny", results=tmp_path / name).card
        assert "| icl | acc | 5 | 0.6250 | 0.1250 | 16 |" in card
        assert "part" not in card.split("## Measured")[1].split("## Loading")[0]
        assert "0.5000" not in card


def test_results_that_are_not_this_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    for content, said in (
        (report(score("elsewhere")).model_dump_json(), ("no scores of FOLDER", "elsewhere")),
        ("{}", ("neither the eval.json",)),
        ("[1]", ("neither the eval.json",)),
        ("no JSON", ("neither the eval.json",)),
    ):
        file.write_text(content)
        with fails("--results", file, *said):
            plan_upload(checkpoint, "me/tiny", results=file)
    with fails("--results", "No such file"):
        plan_upload(checkpoint, "me/tiny", results=tmp_path / "nothing.json")


def test_a_card_is_untouched_until_it_is_touched(checkpoint: Path) -> None:
    card = model_card(checkpoint)
    assert is_untouched(card)
    assert not is_untouched(card.replace("Loading", "Using"))
    assert not is_untouched(card + "More.\n")
    assert not is_untouched("My own card.\n")


def test_a_card_in_the_folder_goes_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "README.md").write_text("Mine.\n")
    planned = plan_upload(checkpoint, "me/tiny")
    assert planned.card == "Mine.\n"
    with planned.staged() as folder:
        assert (folder / "README.md").read_text() == "Mine.\n"
    (tmp_path / "eval.json").write_text(report(score(checkpoint)).model_dump_json())
    with fails("--results", "is yours"):
        plan_upload(checkpoint, "me/tiny", results=tmp_path / "eval.json")


def test_the_oldest_transformers_is_that_of_the_package() -> None:
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"transformers>={TRANSFORMERS}"' in pyproject


# What goes


def test_what_inference_needs_goes_and_nothing_else(checkpoint: Path) -> None:
    (checkpoint / "notes.txt").write_text("private")
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    planned = plan_upload(checkpoint, "me/tiny")
    needed = {"config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"}
    assert planned.sizes().keys() == needed | {"README.md"} | carried_files().keys()
    stays = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "notes.txt"}
    assert set(planned.left_out) == stays | {"trainer_state.json", "keyshift_state.json"}
    with planned.staged() as folder:
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == planned.sizes()
        assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert not folder.exists()
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_without_code_there_is_none(checkpoint: Path) -> None:
    with plan_upload(checkpoint, "me/tiny").staged() as staged:
        shutil.copytree(staged, checkpoint / "again")
    for remote_code in (True, False):
        planned = plan_upload(checkpoint / "again", "me/tiny", remote_code=remote_code)
        code = {name for name in planned.sizes() if name.endswith(".py")}
        assert code == (carried_files().keys() if remote_code else set())
        assert ("auto_map" in planned.written["config.json"]) == remote_code


def test_a_dry_run_lists_and_prints_without_token_or_network(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    done = in_process("push", run.directory / "checkpoint-2", "me/tiny", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(model_card(run.directory / "checkpoint-2", repo="me/tiny"))
    assert f"{len(carried_files()) + 6} files" in done.stdout
    assert "not uploaded: keyshift_state.json, optimizer.pt" in done.stdout


def test_no_tokenizer_is_a_warning(tmp_path: Path) -> None:
    build(CASES["gva"]).save_pretrained(tmp_path)
    done = in_process("push", tmp_path, "me/tiny", "--dry-run")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: there is no tokenizer")


class Planted:
    """What a pickle may do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("planted",))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.pkl", "tokenizer.model", "data"]
)
def test_pickles_are_refused_by_name_and_by_content(
    checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (checkpoint / name).write_bytes(pickle.dumps(Planted()))
    with fails("FOLDER", f"{name} is a pickle, which can run code"):
        plan_upload(checkpoint, "me/tiny")
    torch.save({"weight": torch.ones(2)}, checkpoint / name)
    with fails(f"{name} is a pickle"):
        plan_upload(checkpoint, "me/tiny")
    assert not (tmp_path / "planted").exists()


def sharded(source: Path, target: Path) -> Path:
    """The same checkpoint in several shards."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(WEIGHTS))
    KeyshiftForCausalLM.from_pretrained(source).save_pretrained(target, max_shard_size="60kB")
    assert (target / INDEX).exists()
    return target


def test_weights_that_are_not_whole_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    shards = sharded(checkpoint, tmp_path / "shards")
    first = sorted(shards.glob("*.safetensors"))[0]
    content = first.read_bytes()
    first.unlink()
    with fails(INDEX, first.name, "not there"):
        plan_upload(shards, "me/tiny")
    first.write_bytes(content[:-100])
    with fails(first.name, "cannot be read"):
        plan_upload(shards, "me/tiny")
    tensors = load_file(checkpoint / WEIGHTS)
    for name in ("model.norm.weight", "model.layers.0.self_attn.key_shift.weight"):
        save_file({each: tensor for each, tensor in tensors.items() if each != name}, checkpoint / WEIGHTS)
        with fails("weights missing", name):
            plan_upload(checkpoint, "me/tiny")
    save_file({**tensors, "more": torch.ones(1)}, checkpoint / WEIGHTS)
    with fails("weights not known: more"):
        plan_upload(checkpoint, "me/tiny")
    save_file({**tensors, "model.norm.weight": torch.ones(5)}, checkpoint / WEIGHTS)
    with fails("weights misshapen: model.norm.weight [5] instead of [32]"):
        plan_upload(checkpoint, "me/tiny")
    (checkpoint / WEIGHTS).unlink()
    with fails("no checkpoint of safetensors"):
        plan_upload(checkpoint, "me/tiny")


def test_what_is_no_keyshift_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    with fails("FOLDER", "no such folder"):
        plan_upload(tmp_path / "nowhere", "me/tiny")
    with fails("FOLDER", "no config.json", "pass the folder of a checkpoint"):
        plan_upload(tmp_path, "me/tiny")
    with fails("no config.json", run.directory / "checkpoint-2", "has one"):
        plan_upload(run.directory.parents[2], "me/tiny")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with fails("model_type='llama', not 'keyshift'"):
        plan_upload(tmp_path, "me/tiny")
    (tmp_path / "config.json").write_text('{"model_type": "keyshift", "attention": "none"}')
    with fails("attention='none' is not known"):
        plan_upload(tmp_path, "me/tiny")
    for name in ("a/b/c", "my model", "me/--", "-me/tiny"):
        done = in_process("push", run.directory / "checkpoint-2", "--dry-run", "--", name)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: REPO '{name}' is no name of a repository")
        assert done.stderr.count("\n") == 1


# Uploads, to a server, by processes that are not told to stay offline

UPLOADS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from commands import in_process
from huggingface_hub import HfApi
from transformers import LlamaConfig, LlamaForCausalLM, logging

checkpoint, shards, root, token, reader = sys.argv[2:]
root = Path(root)
said = {}

def push(name, *arguments):
    said[name] = [*in_process("push", *arguments)]

push("first", checkpoint, "me/tiny")
push("branch", checkpoint, "me/tiny", "--revision", "older", "--no-remote-code")
push("public", checkpoint, "me/tiny", "--private")
push("private", checkpoint, "me/secret", "--private")
push("shards", shards, "me/tiny")
HfApi().upload_file(path_or_fileobj=b"Mine.", path_in_repo="README.md", repo_id="me/secret")
push("kept", checkpoint, "me/secret", "--private")
os.environ["HF_TOKEN"] = reader
push("reader", checkpoint, "me/tiny")
os.environ["HF_TOKEN"] = "hf_unknown"
push("unknown", checkpoint, "me/tiny")
os.environ["HF_TOKEN"] = ""
push("none", checkpoint, "me/tiny")
os.environ["HF_TOKEN"] = token

import keyshift
keyshift.KeyshiftForCausalLM.from_pretrained(checkpoint).push_to_hub("me/standard")
sizes = dict(vocab_size=31, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
LlamaForCausalLM(LlamaConfig(**sizes)).push_to_hub("me/llama")
said["convert"] = [*in_process("convert", "me/llama", root / "converted")]
push("converted", root / "converted", "me/converted", "--dry-run")
print("\\n" + json.dumps(said))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as server:
        yield server


@pytest.fixture(scope="module")
def said(hub: Hub, run: Run, root: Path) -> Said:
    """What every upload of `UPLOADS` printed."""
    shards = sharded(run.directory / "checkpoint-2", root / "shards")
    arguments = [Path(__file__).parent, run.directory / "checkpoint-2", shards, root, TOKEN, READER]
    done = python(UPLOADS, *arguments, environment=hub.environment(root / "home"))
    return json.loads(done.splitlines()[-1])


def python(code: str, *arguments: object, environment: dict[str, str]) -> str:
    """What a fresh interpreter prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_what_was_planned_is_what_arrives(said: Said, hub: Hub, run: Run) -> None:
    code, out, _ = said["first"]
    assert (code, out) == (0, f"{hub.address}/me/tiny\n")
    planned = plan_upload(run.directory / "checkpoint-2", "me/secret")
    arrived = {
        name: data for name, data in hub.repositories["me/secret"].files.items() if name != ".gitattributes"
    }
    with planned.staged() as folder:
        expected = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert arrived == {**expected, "README.md": b"Mine."}  # which somebody wrote after the first upload
    assert hub.repositories["me/secret"].private
    assert not hub.repositories["me/tiny"].private
    assert said["kept"][0] == 0
    assert "README.md of me/secret was written or changed by somebody, and stays" in said["kept"][2]
    assert is_untouched(hub.repositories["me/tiny"].files["README.md"].decode())


def test_a_branch_has_files_of_its_own(said: Said, hub: Hub) -> None:
    assert said["branch"][0] == 0
    older = hub.repositories["me/tiny"].branches["older"]
    assert WEIGHTS in older
    assert not [name for name in older if name.endswith(".py")]
    assert "auto_map" not in json.loads(older["config.json"])


def test_weights_of_a_former_upload_do_not_stay(said: Said, hub: Hub) -> None:
    assert said["shards"][0] == 0
    files = hub.repositories["me/tiny"].files
    assert WEIGHTS not in files
    assert INDEX in files
    assert set(json.loads(files[INDEX])["weight_map"].values()) <= files.keys()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("public", "REPO 'me/tiny' exists and is public"),
        ("reader", "REPO 'me/tiny': this token may not write there"),
        ("unknown", "the hub does not accept the token"),
        ("none", "no token for the hub: sign in"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_line(said: Said, name: str, part: str) -> None:
    code, out, errors = said[name]
    assert (code, out) == (2, "")
    assert errors.startswith(f"error: {part}")
    assert errors.count("\n") == 1


def test_no_network_is_a_failed_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)  # and HF_HUB_OFFLINE is set for all tests
    done = in_process("push", run.directory / "checkpoint-2", "me/tiny")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the hub cannot be reached for REPO 'me/tiny'")
    assert done.stderr.count("\n") == 1


def test_transformers_own_push_works(said: Said, hub: Hub, run: Run) -> None:
    files = hub.repositories["me/standard"].files
    assert files.keys() >= {"config.json", WEIGHTS, "README.md"}
    (run.directory / "standard").mkdir(exist_ok=True)
    for name in ("config.json", WEIGHTS):
        (run.directory / "standard" / name).write_bytes(files[name])
    mine, theirs = (
        KeyshiftForCausalLM.from_pretrained(run.directory / name) for name in ("checkpoint-2", "standard")
    )
    assert torch.equal(full(mine, IDS), full(theirs, IDS))


def test_a_converted_checkpoint_names_its_source(said: Said, root: Path) -> None:
    assert said["convert"][0] == 0, said["convert"][2]
    card = said["converted"][1].split("\n\n", 1)[1]
    assert front_matter(card)["base_model"] == "me/llama"
    assert "Converted from me/llama, a `llama` model." in card
    assert json.loads((root / "converted/config.json").read_text())["base_model"] == "me/llama"


# Loading where keyshift is not, and where it is

LOADS = """
import sys
ids, out, installed, *names = sys.argv[1:]
absent = ("keyshift", "scipy")
sys.modules.update(dict.fromkeys(absent))  # whose import fails now
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ids = load_file(ids)["ids"]
found = {}
for name in [*names, installed]:
    if name == installed:  # and now no longer
        for each in absent:
            del sys.modules[each]
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    found[f"{name} logits"] = model(ids, use_cache=False).logits.detach()
    found[f"{name} tokens"] = model.generate(ids, max_new_tokens=8, do_sample=False)
    print(type(model).__module__, type(model.config).__module__)
    model.save_pretrained(Path(out).with_suffix("") / str(name == installed))
save_file(found, out)
"""


@pytest.fixture(scope="module")
def folders(root: Path) -> dict[str, Path]:
    """What would be pushed of every one of `CASES`, without weights being linked."""
    made = {}
    for name, each in CASES.items():
        build(each).save_pretrained(root / f"source-{name}")
        with plan_upload(root / f"source-{name}", f"me/{name}").staged() as staged:
            made[name] = shutil.copytree(staged, root / f"pushed-{name}")
    save_file({"ids": IDS}, root / "ids.safetensors")
    return made


def assert_loaded_like_ours(out: Path, name: str, model: KeyshiftForCausalLM) -> None:
    """The same bits in float32 without a cache; with one, the tokens of greedy decoding."""
    found = load_file(out)
    assert torch.equal(found[f"{name} logits"], full(model, IDS))
    generated = model.generate(IDS, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found[f"{name} tokens"], generated)


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path], said: Said, hub: Hub, root: Path) -> tuple[Path, list[str]]:
    """What `LOADS` found, in folders and on the hub, and the modules of the classes that it got."""
    assert said["private"][0] == 0
    out = root / "found.safetensors"
    names = [folders["gva-shift"], *(folders[name] for name in CASES if name != "gva-shift"), "me/secret"]
    again = shutil.copytree(folders["gva-shift"], root / "where-keyshift-is")
    environment = hub.environment(root / "home-of-another")
    printed = python(LOADS, root / "ids.safetensors", out, again, *names, environment=environment)
    return out, printed.split()


def test_models_load_without_keyshift(
    loaded: tuple[Path, list[str]], folders: dict[str, Path], run: Run
) -> None:
    """By transformers alone, five models in one process, from folders and from the hub."""
    out, modules = loaded
    assert [name.split(".")[0] for name in modules[:-2]] == ["transformers_modules"] * 10
    for name, each in CASES.items():
        assert_loaded_like_ours(out, str(folders[name]), build(each))
    own = KeyshiftForCausalLM.from_pretrained(run.directory / "checkpoint-2").eval()
    assert_loaded_like_ours(out, "me/secret", own)
    saved = {path.name for path in (out.with_suffix("") / "False").iterdir()}
    assert carried_files().keys() - saved == {"modeling_keyshift.py"}  # saved along, by transformers


def test_an_installed_keyshift_is_used_without_being_imported(
    loaded: tuple[Path, list[str]], root: Path
) -> None:
    out, modules = loaded
    assert modules[-2:] == ["keyshift.modeling", "keyshift.configuration"]
    assert_loaded_like_ours(out, str(root / "where-keyshift-is"), build(CASES["gva-shift"]))
    saved = out.with_suffix("") / "True"
    assert "auto_map" not in json.loads((saved / "config.json").read_text())  # of files that are not there
    assert not list(saved.glob("*.py"))


def test_imported_it_is_what_loads_a_pushed_folder(folders: dict[str, Path]) -> None:
    for trust in (True, False, None):
        model = AutoModelForCausalLM.from_pretrained(folders["mla"], trust_remote_code=trust)
        assert type(model) is KeyshiftForCausalLM


def test_carried_code_is_the_packages_own() -> None:
    """Line by line, but for where it imports from and the lines that cannot be there."""
    sources = Path(keyshift.__file__).parent
    changed = []
    for name, text in carried_files().items():
        first, licence, *lines = text.splitlines()
        assert licence == "# SPDX-License-Identifier: Apache-2.0"
        if name == "modeling_keyshift.py":
            continue
        origin = sources / first.split(", ")[1]
        source = (
            (origin if origin.exists() else origin.with_suffix("") / "__init__.py").read_text().splitlines()
        )
        gone = [line for line in source if line not in lines and "from keyshift." not in line]
        new = [line for line in lines if line not in source and "from .keyshift_" not in line]
        changed += gone + new
    assert sorted(changed) == [
        "AutoConfig.register(KeyshiftConfig.model_type, KeyshiftConfig, exist_ok=True)",
        "AutoModel.register(KeyshiftConfig, KeyshiftModel, exist_ok=True)",
        "AutoModelForCausalLM.register(KeyshiftConfig, KeyshiftForCausalLM, exist_ok=True)",
        'BACKENDS = ("cpu", "triton", "reference")',
        'BACKENDS = ("reference",)',
    ]


# Pickles where checkpoints are loaded


def test_a_pickled_checkpoint_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keyshift.circuits import load_model
    from keyshift.opened import open_checkpoint

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pickled"
    model = build(CASES["gva"])
    model.save_pretrained(folder)
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Planted()))
    said = "pytorch_model.bin is a pickle, which can run code"
    with fails(said):
        KeyshiftForCausalLM.from_pretrained(folder)
    with fails(said):
        AutoModelForCausalLM.from_pretrained(folder)
    with fails(said):
        load_model(str(folder))
    with fails(said):
        plan_upload(folder, "me/tiny")
    with fails("has no tokenizer"):
        open_checkpoint(str(folder), "cpu", "auto")
    shutil.copytree(Path(keyshift.__file__).parent / "circuits/models/two-layer", tmp_path / "with-tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "with-tokenizer")
    tokenizer.save_pretrained(folder)
    with fails(said):
        open_checkpoint(str(folder), "cpu", "auto")
    with fails("use_safetensors=False would unpickle"):
        KeyshiftForCausalLM.from_pretrained(folder, use_safetensors=False)
    assert not (tmp_path / "planted").exists()

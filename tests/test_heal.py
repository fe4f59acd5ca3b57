"""Healing: a converted model trained to compute what its source does, its loss computed a second way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import in_process
from safetensors.torch import load_file
from test_convert_mechanism import fitted
from test_start import WORDS
from texts import write_jsonl
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.data import FileSource, TextData, prepare
from keyshift.errors import UserError
from keyshift.pretrain import Watching, pretrain
from keyshift.pretrain import dry_run as dry
from keyshift.recipe import Recipe, Training, load_recipe, parse_recipe
from keyshift.runs import Run
from keyshift.training import TextSource, newest_checkpoint
from keyshift.training.activations import recompute_activations_
from keyshift.training.distillation import Distillation, attention_outputs

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

SMALL = """
title = "small"
seeds = 1
[data]
sequence_length = 32
[training]
steps = 8
batch_size = 4
eval_steps = 4
eval_batches = 2
save_steps = 100
learning_rate = 1e-3
weight_decay = 0.0
[variants.healed]
"""


def foreign(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **fields}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a Llama, the same as a keyshift model, and as GVA fitted to other text."""
    folder = tmp_path_factory.mktemp("heal")
    (folder / "small.toml").write_text(SMALL)
    lines = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 90)) + f" {n}" for n in range(80)]
    write_jsonl(folder / "text.jsonl", lines)
    write_jsonl(folder / "letters.jsonl", [f"{n} other letters {n * n} " * 40 for n in range(60)])
    options: dict[str, Any] = {"vocab_size": 300, "validation_fraction": 0.3, "end_token": True}
    prepare(FileSource([folder / "text.jsonl"]), folder / "store", tokenizer=None, **options)
    taught = {"training.steps": 60, "training.learning_rate": 0.005, "training.schedule": "linear"}
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    model = {f"model.{name}": size for name, size in {**sizes, "initializer_range": 0.3}.items()}
    nobody = {"training.start_from": None, "training.distil_from": None}
    run, _ = pretrain(recipe(folder, **taught, **model, **nobody), folder / "taught")
    shutil.copytree(newest_checkpoint(run.directory), folder / "plain")
    in_gva = ("--attention", "gva", "--text", "letters.jsonl", "--tokens", "4000", "--rope-width", "2")
    for arguments in (("plain", "llama", "--to", "llama"), ("llama", "gva", *in_gva)):
        done = in_process("convert", *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def recipe(place: Path, **overrides: Any) -> Recipe:
    paths = {"start_from": str(place / "gva"), "distil_from": str(place / "llama")}
    chosen = {
        "data.paths": [str(place / "store")],
        **{f"training.{key}": path for key, path in paths.items()},
    }
    return load_recipe(str(place / "small.toml"), {**chosen, **overrides})


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(run.directory) / "model.safetensors")


def logged(run: Run) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def opened(path: Path) -> KeyshiftForCausalLM:
    return KeyshiftForCausalLM.from_pretrained(path).eval()


# The loss, computed a second way


def by_hand(
    teacher: KeyshiftForCausalLM, model: KeyshiftForCausalLM, batch: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """KL, attention error and cross-entropy of a whole batch in float64, from the definitions."""
    inputs = {name: rows for name, rows in batch.items() if name != "labels"}
    logits, added = [], []
    for each in (teacher, model):
        outputs: list[torch.Tensor] = []
        for block in each.model.layers:
            block.self_attn.o_proj.register_forward_hook(lambda _, __, result, to=outputs: to.append(result))
        logits.append(each(**inputs, use_cache=False).logits[:, :-1].double())
        added.append([output.double() for output in outputs])
        for block in each.model.layers:
            block.self_attn.o_proj._forward_hooks.clear()
    answers = batch["labels"][:, 1:]
    theirs, own = (each.softmax(-1)[answers != -100] for each in logits)
    kl = (theirs * (theirs / own).log()).sum(-1).mean()
    errors = [(b - a).norm() ** 2 / a.norm() ** 2 for a, b in zip(*added, strict=True)]
    labels = cross_entropy(logits[1].flatten(0, 1), answers.flatten())
    return [kl, torch.stack(errors).mean(), labels]


def a_pair(**fields: Any) -> tuple[KeyshiftForCausalLM, KeyshiftForCausalLM]:
    torch.manual_seed(0)
    teacher = KeyshiftForCausalLM(KeyshiftConfig(**{**SIZES, "initializer_range": 0.3, **fields})).eval()
    return teacher, fitted(teacher, 2).train()


def a_batch(rows: int = 6, length: int = 24) -> dict[str, torch.Tensor]:
    """Two documents in a row, and very unlike numbers of labels that count."""
    ids = torch.randint(1, 300, (rows, length), generator=torch.Generator().manual_seed(1))
    counted = torch.arange(length)[None] >= 3 * torch.arange(rows)[:, None]
    positions = torch.cat((torch.arange(10), torch.arange(length - 10))).expand(rows, -1)
    return {"input_ids": ids, "labels": ids.where(counted, -100), "position_ids": positions}


WEIGHTS = {"distil_logits": 0.7, "distil_attention": 0.4, "distil_labels": 0.2}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_parts_and_gradients_are_those_of_a_direct_computation(
    tied: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and in three micro-batches, chunks of seven tokens; blocks kept and computed again."""
    monkeypatch.setattr("keyshift.training.distillation.LOGITS_AT_A_TIME", 7 * 300)
    teacher, model = a_pair(tie_word_embeddings=tied)
    batch = a_batch()
    parts = by_hand(teacher, model, batch)
    sum(weight * part for weight, part in zip(WEIGHTS.values(), parts, strict=True)).backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    teacher.zero_grad()
    if recompute:
        recompute_activations_(model)
    labels = (batch["labels"][:, 1:] != -100).sum()
    for size in (6, 2):
        pieces = [{name: rows[at : at + size] for name, rows in batch.items()} for at in range(0, 6, size)]
        distillation = Distillation(teacher, Training(**WEIGHTS))
        distillation.measure(pieces)
        model.zero_grad()
        for piece in pieces:
            distillation.loss(model, model, piece, labels).backward()
        assert list(distillation.parts().values()) == pytest.approx(torch.stack(parts).tolist(), rel=1e-4)
        assert not any(distillation.parts().values())
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight.grad, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    assert all(weight.grad is None for weight in teacher.parameters())


def test_the_logits_of_both_models_are_never_there_in_float32_at_once() -> None:
    """What is kept for the backward pass grows with the vocabulary by the model's own logits, no more."""
    rows, length = 4, 32
    kept = []
    for vocabulary in (1000, 3000):
        torch.manual_seed(0)
        config = KeyshiftConfig(**{**SIZES, "vocab_size": vocabulary})
        teacher, model = KeyshiftForCausalLM(config), KeyshiftForCausalLM(config)
        ids = torch.randint(vocabulary, (rows, length))
        found: dict[int, int] = {}

        def keep(tensor: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        own = {each.data_ptr() for every in (teacher, model) for each in every.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = Distillation(teacher, Training()).loss(
                model, model, {"input_ids": ids, "labels": ids}, ids.numel()
            )
        kept.append(sum(size for place, size in found.items() if place not in own))
        loss.backward()
    assert kept[1] - kept[0] <= 1.01 * 4 * rows * length * 2000


def test_a_model_that_is_its_teacher_has_no_loss_and_stays(place: Path, tmp_path: Path) -> None:
    still = {"training.start_from": str(place / "plain")}
    run, result = pretrain(recipe(place, **still), tmp_path)
    first = logged(run)[0]
    assert {first[part] for part in ("loss", "kl", "attention_error", "grad_norm")} == {0.0}
    assert first["label_loss"] > 1
    assert [loss for _, loss in result.train_loss] == [0.0]
    start, end = load_file(place / "plain/model.safetensors"), weights_of(run)
    assert all(torch.equal(start[name], end[name]) for name in start)


# What comes of it


def distance(place: Path, path: Path) -> float:
    """KL from the teacher on held-out text, nats per token."""
    teacher, model = opened(place / "plain"), opened(path)
    total, count = 0.0, 0
    for batch in TextData.open(place / "store").validation.sequential(4, 32, 4):
        inputs = {name: rows for name, rows in batch.items() if name != "labels"}
        with torch.no_grad():
            theirs, own = (each(**inputs, use_cache=False).logits.softmax(-1) for each in (teacher, model))
        total += float((theirs * (theirs / own).log()).sum())
        count += theirs[..., 0].numel()
    return total / count


def test_a_healed_model_is_nearer_to_its_source_than_it_was_and_than_labels_bring_it(
    place: Path, tmp_path: Path
) -> None:
    longer = {"training.steps": 50, "training.schedule": "linear", "training.eval_steps": 25}
    labels = {"distil_logits": 0.0, "distil_attention": 0.0, "distil_labels": 1.0}
    plain = {f"training.{key}": value for key, value in labels.items()}
    healed, result = pretrain(recipe(place, **longer), tmp_path / "healed")
    other, _ = pretrain(recipe(place, **longer, **plain), tmp_path / "other")
    ends = [distance(place, newest_checkpoint(run.directory)) for run in (healed, other)]
    assert ends[0] < 0.5 * distance(place, place / "gva")
    assert ends[0] < 0.75 * ends[1]
    steps = [line for line in logged(healed) if "kl" in line]
    assert steps[-1]["attention_error"] < 0.6 * steps[0]["attention_error"]
    assert steps[-1]["loss"] == pytest.approx(steps[-1]["kl"] + steps[-1]["attention_error"], rel=1e-5)
    assert all(line["tokens_per_second"] > 0 for line in steps)
    assert "attention_error" not in next(line for line in logged(other) if "kl" in line)
    held_out = TextSource(TextData.open(place / "store"), 32).validate(
        opened(newest_checkpoint(healed.directory)), 4, 2
    )
    assert result.curve[-1].loss == pytest.approx(held_out["loss"], rel=1e-5)


def test_labels_alone_are_ordinary_training(place: Path, tmp_path: Path) -> None:
    labels = {"distil_logits": 0.0, "distil_attention": 0.0, "distil_labels": 1.0}
    plain = {f"training.{key}": value for key, value in labels.items()}
    taught, _ = pretrain(recipe(place, **plain), tmp_path / "taught")
    alone, _ = pretrain(recipe(place, **{"training.distil_from": None}), tmp_path / "alone")
    ends = weights_of(taught), weights_of(alone)
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name], rtol=1e-3, atol=1e-4, msg=name)


def test_stopped_and_gone_on_with_it_ends_as_if_nothing_had_been(place: Path, tmp_path: Path) -> None:
    chosen = recipe(place, **{"engine.micro_batch_size": 2})
    asked = iter([False] * 2 + [True])
    pretrain(chosen, tmp_path / "parts", watching=Watching(stop=lambda: next(asked)))
    parts, resumed = pretrain(chosen, tmp_path / "parts", resume=True)
    whole, straight = pretrain(chosen, tmp_path / "whole")
    assert resumed.curve == straight.curve
    ends = weights_of(parts), weights_of(whole)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_another_teacher_under_the_same_name_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "plain", tmp_path / "teacher")
    chosen = recipe(place, **{"training.distil_from": str(tmp_path / "teacher")})
    asked = iter([False, True])
    pretrain(chosen, tmp_path / "run", watching=Watching(stop=lambda: next(asked)))
    other = opened(place / "plain")
    other.lm_head.weight.data *= 1.01
    other.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match="is another model than the one that this run began with"):
        pretrain(chosen, tmp_path / "run", resume=True)


# What it takes, and what is refused


def test_a_dry_run_counts_the_teacher(place: Path) -> None:
    with_it = dry(recipe(place))[0]
    without = dry(recipe(place, **{"training.distil_from": None}))[0]
    weights = sum(each.numel() for each in opened(place / "plain").parameters())
    outputs = 2 * 4 * 32 * 32 * 4 * 2  # layers, rows, tokens, hidden size, float32, outputs and differences
    assert with_it["teacher_bytes"] == 4 * weights + outputs
    assert with_it["memory_bytes"] == without["memory_bytes"] + with_it["teacher_bytes"]
    assert 1.2 < with_it["flops_per_token"] / without["flops_per_token"] < 1.5
    assert with_it["step_seconds"] > 0


REFUSED = [
    ({"training.distil_from": "nowhere/"}, "training.distil_from='nowhere/': no model configuration at"),
    ({"training.distil_from": "bare"}, "neither model.safetensors nor"),
    ({"training.distil_from": "gpt2"}, "model_type='gpt2' cannot be converted"),
    ({"training.distil_from": "vocabulary"}, "has vocab_size=310 and the model 300; use the checkpoint"),
    ({"training.distil_from": "wide"}, "has hidden_size=64 and the model 32"),
    ({"training.distil_from": "deep"}, "num_hidden_layers=3 and the model 2; use the checkpoint that the"),
    ({"training.distil_from": "short"}, "max_position_embeddings=16, below sequence_length=32"),
]


def strangers(place: Path) -> None:
    """Teachers that do not fit, in the folder where the tests are."""
    from transformers import GPT2Config

    if Path("gpt2").exists():
        return
    LlamaConfig(**SIZES).save_pretrained("bare")
    GPT2Config().save_pretrained("gpt2")
    wrong: dict[str, dict[str, Any]] = {
        "vocabulary": {"vocab_size": 310},
        "wide": {"hidden_size": 64},
        "deep": {"num_hidden_layers": 3},
        "short": {"max_position_embeddings": 16},
    }
    for name, fields in wrong.items():
        foreign(**fields).save_pretrained(name)


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[str(each) for _, each in REFUSED])
def test_a_teacher_that_does_not_fit_is_one_line_before_training_and_in_a_dry_run(
    overrides: dict[str, Any], message: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    strangers(place)
    chosen = recipe(place, **overrides)
    for work in (lambda: dry(chosen), lambda: pretrain(chosen, tmp_path / "out")):
        with pytest.raises(UserError) as caught:
            work()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/runs").exists()


def test_a_teacher_of_another_size_teaches_logits(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    strangers(place)
    wider = {"training.distil_from": "wide", "training.distil_attention": 0.0, "training.steps": 2}
    run, result = pretrain(recipe(place, **wider), tmp_path)
    assert result.status == "finished"
    assert logged(run)[0]["loss"] == logged(run)[0]["kl"] > 0


def test_a_teacher_with_another_tokenizer_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "plain", tmp_path / "teacher")
    options: dict[str, Any] = {"validation_fraction": 0.3, "end_token": True, "tokenizer": None}
    prepare(FileSource([place / "letters.jsonl"]), tmp_path / "other", vocab_size=290, **options)
    shutil.copytree(tmp_path / "other/tokenizer", tmp_path / "teacher", dirs_exist_ok=True)
    chosen = recipe(place, **{"training.distil_from": str(tmp_path / "teacher")})
    with pytest.raises(UserError, match=r"another tokenizer than that of training\.distil_from="):
        pretrain(chosen, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distil_logits": 0, "distil_attention": 0}, "are all 0: nothing is left to train for"),
        ({}, "engine.compile=true hides the attention outputs that training.distil_attention=1.0"),
        ({"distil_attention": -1.0}, "greater than or equal to 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    content = {
        "title": "t",
        "task": {"name": "induction"},
        "variants": {"a": {}},
        "engine": {"compile": True},
        "training": {"distil_from": "somewhere", **changes},
    }
    with pytest.raises(UserError, match=message):
        parse_recipe(content, "r")


def test_outputs_are_heard_only_inside_the_context() -> None:
    _, model = a_pair()
    ids = a_batch()["input_ids"]
    with attention_outputs(model, True) as heard:
        model(ids)
    model(ids)
    assert [tuple(each.shape) for each in heard] == [(6, 24, 32)] * 2


# The command


def test_the_commands_of_the_docs(place: Path, tmp_path: Path) -> None:
    """Convert, prepare, look ahead, heal, heal again."""
    shutil.copytree(place / "llama", tmp_path / "source")
    shutil.copy(place / "text.jsonl", tmp_path)
    short = ["training.steps=4", "training.batch_size=4", "training.eval_batches=1"]
    heal = ("train", "heal", "store", "--out", "healed", *short, "data.sequence_length=32")
    prepared = ("store", "--validation-fraction", "0.3")
    commands: list[tuple[Any, ...]] = [
        ("convert", "source", "gva", "--attention", "gva", "--text", "text.jsonl", "--tokens", "2000"),
        ("data", "prepare", "text.jsonl", "--tokenizer", "gva", "--out", *prepared),
        (*heal, "--dry-run"),
        heal,
        (*heal, "--resume", "auto"),
    ]
    for command in commands:
        done = in_process(*command, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert KeyshiftForCausalLM.from_pretrained(tmp_path / "healed/runs/healed/seed-0/checkpoint-4")

"""Which checkpoints the words of the command line mean, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_mirror import WORDS
from transformers import PreTrainedTokenizerFast

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.data import train_tokenizer
from keyshift.evaluation.models import find_models
from keyshift.opened import check_checkpoint, fingerprint, open_checkpoint

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def checkpoint(folder: Path) -> str:
    """A folder that looks like one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return str(folder)


def comparison(root: Path) -> Path:
    """The folder of a comparison: two variants, three seeds, one of which has not been saved yet."""
    for variant, steps in (("gqa", (100, 100)), ("gva-shift", (100, 80))):
        for seed, last in enumerate(steps):
            for step in (20, last):
                checkpoint(root / "runs" / variant / f"seed-{seed}" / f"checkpoint-{step}")
        (root / "runs" / variant / "seed-10").mkdir()
    return root


def test_a_comparison_is_all_its_variants_with_the_newest_checkpoint_of_every_seed(tmp_path: Path) -> None:
    runs = comparison(tmp_path / "text") / "runs"
    models = find_models([str(tmp_path / "text")])
    assert models.named == {
        "gqa": [str(runs / f"gqa/seed-{seed}/checkpoint-100") for seed in (0, 1)],
        "gva-shift": [
            str(runs / "gva-shift/seed-0/checkpoint-100"),
            str(runs / "gva-shift/seed-1/checkpoint-80"),
        ],
    }
    assert len(models.remarks) == 3
    assert sum("seed-10: no checkpoint" in remark for remark in models.remarks) == 2
    assert "seeds differ in their steps (checkpoint-100, checkpoint-80)" in models.remarks[-1]


def test_seeds_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for seed in (10, 2, 0):
        checkpoint(tmp_path / "variant" / f"seed-{seed}" / "checkpoint-5")
    (seeds,) = find_models([str(tmp_path / "variant")]).named.values()
    assert [Path(seed).parent.name for seed in seeds] == ["seed-0", "seed-2", "seed-10"]


def test_folders_names_and_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    *_, odd = (checkpoint(tmp_path / name) for name in ("a", "b", "lr=0.1"))
    run = comparison(tmp_path / "text") / "runs"
    words = [
        "Both=a,b",
        odd,
        f"mine={run / 'gqa'}",
        str(run / "gva-shift/seed-1"),
        "gpt2",
        "org/name",
    ]
    with pytest.raises(UserError, match="given twice"):
        find_models(["a", "Both=a,b"])
    assert find_models(words).named == {
        "Both": ["a", "b"],
        "lr=0.1": [odd],
        "mine": [str(run / f"gqa/seed-{seed}/checkpoint-100") for seed in (0, 1)],
        "seed-1": [str(run / "gva-shift/seed-1/checkpoint-80")],
        "gpt2": ["gpt2"],
        "org/name": ["org/name"],
    }


def test_checkpoints_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    first, second = (checkpoint(tmp_path / run / "checkpoint-5") for run in ("one", "two"))
    assert list(find_models([first, second]).named) == ["checkpoint-5", second]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("./none", "no such folder"),
        ("one/two/three", "no such folder"),
        ("", "NAME=CHECKPOINT"),
        ("file.txt", "not a folder"),
        ("empty", "neither config.json nor checkpoints"),
        ("=a", "NAME=CHECKPOINT"),
        ("Name=", "NAME=CHECKPOINT"),
        ("Name=text", "holds 2 variants"),
        ("Name=./none", "no such folder"),
    ],
)
def test_what_names_no_checkpoint_is_refused(
    word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file.txt").write_text("")
    Path("empty").mkdir()
    comparison(Path("text"))
    with pytest.raises(UserError, match=said):
        find_models([word])


# Opened


def save(folder: Path, vocabulary: int = 300, **changes: object) -> str:
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, 300)
    KeyshiftForCausalLM(KeyshiftConfig(vocab_size=vocabulary, **SMALL, **changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path: Path) -> None:
    name = save(tmp_path / "m")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / file).unlink()
    for refuse in (check_checkpoint, lambda name: open_checkpoint(name, "cpu", "auto")):
        with pytest.raises(UserError, match=r"has no tokenizer; .*save_pretrained"):
            refuse(name)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    name = save(tmp_path / "m", vocabulary=290)
    with pytest.raises(UserError, match=r"has \d+ tokens and the model embeddings for 290"):
        check_checkpoint(name)
    assert check_checkpoint(save(tmp_path / "padded", vocabulary=512)) == 2048


def test_a_tokenizer_without_bos_and_eos_is_refused(tmp_path: Path) -> None:
    name = save(tmp_path / "m")
    (tmp_path / "m/tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    with pytest.raises(UserError, match="neither a BOS nor an EOS token"):
        check_checkpoint(name)


def test_damaged_checkpoints_unknown_devices_and_dtypes_are_refused(tmp_path: Path) -> None:
    name = save(tmp_path / "m")
    with pytest.raises(UserError, match="did you mean 'bfloat16'"):
        open_checkpoint(name, "cpu", "bfloat")
    with pytest.raises(UserError, match="--device='cpux' cannot be used"):
        open_checkpoint(name, "cpux", "auto")
    (tmp_path / "m/tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer of .* cannot be read"):
        check_checkpoint(name)
    (tmp_path / "m/config.json").write_text("{")
    with pytest.raises(UserError):
        check_checkpoint(name)
    weights = tmp_path / "other/model.safetensors"
    name = save(tmp_path / "other")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        open_checkpoint(name, "cpu", "auto")


def test_a_fingerprint_is_of_weights_configuration_and_tokenizer(tmp_path: Path) -> None:
    name = save(tmp_path / "m")
    first = open_checkpoint(name, "cpu", "auto")
    moved = tmp_path / "elsewhere"
    Path(name).rename(moved)
    assert open_checkpoint(str(moved), "cpu", "auto").fingerprint == first.fingerprint
    assert open_checkpoint(str(moved), "cpu", "bfloat16").fingerprint != first.fingerprint
    assert open_checkpoint(save(tmp_path / "again"), "cpu", "auto").fingerprint != first.fingerprint
    other = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(["cats and dogs"], 260).backend_tokenizer, eos_token="<|endoftext|>"
    )
    assert fingerprint(first.model, other) != first.fingerprint
    first.model.model.layers[0].self_attn.o_proj.weight.data[0, 0] += 1e-3
    assert fingerprint(first.model, first.tokenizer) != first.fingerprint

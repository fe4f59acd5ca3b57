"""``keyshift circuits`` as a user meets it: what it prints and writes, and what it refuses, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from commands import exit_code
from transformers import PreTrainedTokenizerFast

from keyshift.circuits import load_model, shipped_models
from keyshift.circuits.results import CircuitsReport
from keyshift.data import train_tokenizer

SMALL = ("--period", "6", "--sequences", "4")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A checkpoint of random weights without a tokenizer, whose configuration names token 1 as BOS."""
    zoo.build("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_the_shipped_models_show_both_circuits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: (folder / "model.safetensors").read_bytes() for name, folder in shipped_models().items()}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert exit_code(monkeypatch, "circuits", "--sequences", "20", "--out", tmp_path / "out") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert last == f"report: {tmp_path / 'out/circuits.html'}"
    report = CircuitsReport.model_validate_json((tmp_path / "out/circuits.json").read_text())
    two, one = report.models
    assert [two.facts.name, one.facts.name] == list(shipped_models())

    by_name = {head.name: head for head in two.heads}
    assert two.previous_token_head is not None
    previous = by_name[two.previous_token_head]
    assert previous.layer == 0
    assert previous.previous_token > 0.8
    strongest = by_name[two.induction_heads[0]]
    assert strongest.layer == 1
    assert strongest.induction > 0.9
    key = next(each for each in two.lifts if each.head == strongest.name and each.side == "key")
    assert key.parts[0].name == previous.name
    without = {tuple(each.heads): each for each in two.ablations}
    whole = without[()]
    assert whole.loss[-1] < 0.1
    assert without[(previous.name,)].loss[-1] > 10
    assert without[(previous.name,)].induction[strongest.name] < 0.1
    assert without[tuple(two.induction_heads)].loss[-1] > 10

    assert one.previous_token_head is None
    assert one.facts.layers == 1
    heads = {head.name: head for head in one.heads}
    strongest = heads[one.induction_heads[0]]
    assert strongest.induction > 0.7
    assert strongest.matching_with == "shift"
    assert strongest.key_shift is not None
    assert strongest.key_shift[1] > strongest.key_shift[0]
    key = next(each for each in one.lifts if each.head == strongest.name and each.side == "key")
    assert (key.parts[0].name, key.parts[0].shift) == ("embedding", 1)
    without = {tuple(each.heads): each for each in one.ablations}
    assert without[tuple(one.induction_heads)].loss[-1] > 10
    after = {name: (folder / "model.safetensors").read_bytes() for name, folder in shipped_models().items()}
    assert after == before


def test_json_is_all_that_stdout_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "circuits", llama, *SMALL, "--out", tmp_path / "out", "--json") == 0
    printed = capsys.readouterr()
    (row,) = json.loads(printed.out)
    assert row["model"] == "llama"
    assert len(row["heads"]) == len(load_model(str(llama)).head_names())
    assert "circuits.html" in printed.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"circuits.json", "circuits.html"}


def test_the_toy_prints_the_numbers_of_the_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "circuits", "toy") == 0
    printed = capsys.readouterr().out
    assert "0.0, 4.0, 0.0, 0.0" in printed
    assert "0.017, 0.948, 0.017, 0.017" in printed
    assert exit_code(monkeypatch, "circuits", "toy", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["k_composition_term"] == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    assert [round(each["value"], 2) for each in values["examples"].values()] == [1, 0, 0.33]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--period", "1"), "period=1 must be at least 2"),
        (("--repeats", "1"), "repeats=1 must be at least 2"),
        (("--sequences", "0"), "sequences=0 must be at least 1"),
        (("--period", "1000"), "period=1000 needs as many different tokens"),
        (("--bos", "5000"), "bos=5000 is outside the vocabulary"),
        (("--convention", "papr"), "did you mean 'paper'?"),
        (("--ablation", "means"), "did you mean 'mean'?"),
        (("--head", "9.0"), "layer=9 is out of range"),
        (("--head", "0.9"), "head=9 is out of range"),
        (("--head", "six"), "must look like 1.6"),
        (("--text", "a b a b"), "needs a tokenizer"),
        (("--ablation", "resample", "--sequences", "1"), "needs at least 2"),
    ],
)
def test_what_does_not_fit_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    llama: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    assert exit_code(monkeypatch, "circuits", llama, *SMALL, *arguments, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_be_analysed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = zoo.fresh("llama")
    with torch.no_grad():
        broken.lm_head.weight[3, 3] = torch.nan
    broken.save_pretrained(tmp_path / "nan")
    no_bos = zoo.fresh("llama", bos_token_id=None)
    no_bos.save_pretrained(tmp_path / "no-bos")
    tokenizer: PreTrainedTokenizerFast = train_tokenizer(["some text of no matter"], 300)
    zoo.build("llama").save_pretrained(tmp_path / "foreign")
    tokenizer.save_pretrained(tmp_path / "foreign")
    expected = {
        tmp_path / "nan": "has NaN or infinite entries",
        tmp_path / "no-bos": "has no BOS token",
        tmp_path / "foreign": "do not belong together",
        tmp_path / "nowhere": "nowhere",
    }
    capsys.readouterr()  # transformers' progress in saving
    for folder, message in expected.items():
        assert exit_code(monkeypatch, "circuits", folder, *SMALL, "--out", tmp_path / "out") == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert len(error.splitlines()) == 1
    told = ("--bos", "1", "--out", tmp_path / "out")
    assert exit_code(monkeypatch, "circuits", tmp_path / "no-bos", *SMALL, *told) == 0


def test_a_model_whose_own_code_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A configuration that promises more positions than there are."""
    zoo.build("gpt2").save_pretrained(tmp_path / "gpt2")
    model = load_model(str(tmp_path / "gpt2"))
    model.config.n_positions = 10_000
    monkeypatch.setattr("keyshift.circuits.command.load_model", lambda name: model)
    capsys.readouterr()
    long = ("--period", "20", "--repeats", "40", "--with-replacement", "--bos", "1", "--sequences", "2")
    assert exit_code(monkeypatch, "circuits", "gpt2", *long, "--out", tmp_path / "out") == 1
    error = capsys.readouterr().err.strip()
    assert "(GPT2LMHeadModel) cannot be analysed: " in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert exit_code(monkeypatch, "circuits", llama, *SMALL, "--out", tmp_path / "file") == 2
    assert "pass another --out" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"

"""Benchmarks through lm-evaluation-harness: its own numbers, one start token, no influence of batches."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_mirror import text, write_mirror
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.data import train_tokenizer
from keyshift.evaluation.answers import Answers
from keyshift.evaluation.command import Request, evaluate_models
from keyshift.evaluation.results import EvalReport, Score
from keyshift.opened import Opened, open_checkpoint

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from keyshift.evaluation.harness_model import Model

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
MECHANISMS: dict[str, dict[str, Any]] = {
    "gqa": {"attention": "gqa"},
    "gqa-shift": {"attention": "gqa", "shift": "kv"},
    "gva": {"attention": "gva", "position": "decoupled_rope", "qk_rope_head_dim": 4},
    "gva-shift": {"attention": "gva", "position": "decoupled_rope", "qk_rope_head_dim": 4, "shift": "kv"},
    "mla": {"attention": "mla", "position": "decoupled_rope", "qk_rope_head_dim": 4, "kv_lora_rank": 12},
}
ZERO_SHOT = "hellaswag,winogrande,openbookqa,arc_easy,arc_challenge,lambada_openai"


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    rng = random.Random(0)
    return train_tokenizer([text(rng, 200) for _ in range(20)], 320)


def save(folder: Path, model: Any, tokens: PreTrainedTokenizerFast) -> str:
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return str(folder)


def keyshift_model(folder: Path, mechanism: str, seed: int = 0, **changes: Any) -> str:
    torch.manual_seed(seed)
    sizes = {**SIZES, "vocab_size": len(tokenizer()), "max_position_embeddings": 512, **changes}
    return save(folder, KeyshiftForCausalLM(KeyshiftConfig(**sizes, **MECHANISMS[mechanism])), tokenizer())


def llama(folder: Path, adds_bos: bool = True) -> str:
    """A random Llama whose tokenizer puts BOS first, as Llama's does, unless it is not to."""
    backend = deepcopy(tokenizer().backend_tokenizer)
    if not adds_bos:
        backend.post_processor = None
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": len(tokens), "max_position_embeddings": 512}
    return save(folder, LlamaForCausalLM(LlamaConfig(**sizes)), tokens)


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mirror(tmp_path_factory.mktemp("mirror"))


def evaluate(names: list[str], tasks: str, mirror: Path, out: Path, **changes: Any) -> EvalReport:
    options: dict[str, Any] = {
        "shots": None,
        "limit": None,
        "batch_size": 4,
        "device": "cpu",
        "dtype": "auto",
    }
    request = Request(tasks=tasks, data_root=mirror, text=None, out=out, **{**options, **changes})
    return evaluate_models(names, request, lambda *_: None)


def values(scores: list[Score]) -> dict[tuple[str, str], float]:
    return {(score.task, score.metric): score.value for score in scores}


# The harness's own numbers


def harness_command(
    model: str, tasks: str, mirror: Path, out: Path, more: str, shots: int | None
) -> dict[tuple[str, str], float]:
    """What ``lm_eval`` itself says, run as its users run it, in the folder of the data."""
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={model}{more}"]
    command += ["--tasks", tasks, "--device", "cpu", "--batch_size", "3", "--output_path", str(out)]
    command += [] if shots is None else ["--num_fewshot", str(shots)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
    done = subprocess.run(command, cwd=mirror, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = out.rglob("results_*.json")
    found = {}
    for task, metrics in json.loads(file.read_text())["results"].items():
        for key, value in metrics.items():
            if "," in key and "stderr" not in key:
                found[task, key.split(",")[0]] = value
    return found


@pytest.mark.parametrize(
    ("adds_bos", "more", "shots"),
    [(True, "", None), pytest.param(False, ",add_bos_token=True", 2, marks=pytest.mark.slow)],
)
def test_a_llama_scores_what_the_command_of_the_harness_says(
    adds_bos: bool, more: str, shots: int | None, mirror: Path, tmp_path: Path
) -> None:
    name = llama(tmp_path / "llama", adds_bos)
    tasks = f"{ZERO_SHOT},mmlu_anatomy,hendrycks_math_algebra"
    ours = values(evaluate([name], tasks, mirror, tmp_path / "out", shots=shots).scores)
    theirs = harness_command(name, tasks, mirror, tmp_path / "theirs", more, shots)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 13
    assert len(set(ours.values())) > 2  # by chance many are right as often
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=1e-4), key  # their batches are of another size


def test_a_group_of_the_harness_is_scored_as_a_whole_and_by_its_parts(mirror: Path, tmp_path: Path) -> None:
    name = keyshift_model(tmp_path / "model", "gqa")
    report = evaluate([name], "ai2_arc,cmmlu_anatomy,mmlu_anatomy", mirror, tmp_path / "out", shots=2)
    scores = {(score.task, score.metric): score for score in report.scores}
    assert {task for task, _ in scores} == {"arc_easy", "arc_challenge", "cmmlu_anatomy", "mmlu_anatomy"}
    assert all(score.shots == 2 for score in report.scores)
    acc = scores["mmlu_anatomy", "acc"]
    assert acc.requests == 4 * acc.questions == 24
    assert acc.error == pytest.approx((acc.value * (1 - acc.value) / 5) ** 0.5)


def test_every_checkpoint_sees_the_same_examples(mirror: Path, tmp_path: Path) -> None:
    names = [keyshift_model(tmp_path / name, "gva") for name in ("one", "two")]
    config = Path(names[1], "config.json")  # another fingerprint, so that nothing is read from disk
    config.write_text(config.read_text().replace(": 512", ": 511"))
    report = evaluate(names, "hellaswag,arc_easy", mirror, tmp_path / "out", shots=3)
    one, two = (values([s for s in report.scores if s.checkpoint == name]) for name in names)
    assert len(set(report.answers.values())) == 2
    assert one == two


# What a model is asked


def asked(opened: Opened, folder: Path, batch_size: int = 1) -> Model:
    return Model(opened, Answers(folder, opened.fingerprint), batch_size, lambda *_: None)


def question(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, tuple(arguments), 0, metadata=("questions", 0, 1))  # type: ignore[arg-type]


def pairs(count: int = 12) -> list[tuple[str, str]]:
    rng = random.Random(1)
    return [(text(rng, rng.randint(9, 90)), " " + text(rng, 9)) for _ in range(count)] + [("", "A text.")]


def direct(opened: Opened, context: str, continuation: str) -> float:
    """log p(continuation | context) from the model's logits, with one BOS put by hand."""
    plain = functools.partial(opened.tokenizer.encode, add_special_tokens=False)
    before, whole = [0, *plain(context)], [0, *plain(context + continuation)]
    with torch.no_grad():
        logs = opened.model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(float(logs[place - 1, whole[place]]) for place in range(len(before), len(whole)))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_answers_are_those_of_the_logits_and_do_not_depend_on_the_batch(
    mechanism: str, tmp_path: Path
) -> None:
    opened = open_checkpoint(keyshift_model(tmp_path / "m", mechanism), "cpu", "auto")
    requests = [question("loglikelihood", *pair) for pair in pairs()]
    alone, together = (asked(opened, tmp_path / str(size), size).loglikelihood(requests) for size in (1, 5))
    for (context, continuation), one, other in zip(pairs(), alone, together, strict=True):
        assert one[0] == pytest.approx(direct(opened, context, continuation), rel=1e-4)
        assert other[0] == pytest.approx(one[0], rel=1e-4)

    settings = {"until": ["stone"], "do_sample": False, "max_gen_toks": 24}
    requests = [question("generate_until", context, settings) for context, _ in pairs()[:-1]]
    alone, together = (
        asked(opened, tmp_path / f"{size} generated", size).generate_until(requests) for size in (1, 5)
    )
    assert alone == together
    for (context, _), answer in zip(pairs(), alone, strict=False):
        ids = torch.tensor([[0, *opened.tokenizer.encode(context, add_special_tokens=False)]])
        said = greedy(opened, ids, 24)
        assert answer == opened.tokenizer.decode(said, skip_special_tokens=True).split("stone")[0]


def greedy(opened: Opened, ids: torch.Tensor, tokens: int) -> list[int]:
    """Greedy decoding without a cache, up to EOS or a stop word."""
    said: list[int] = []
    for _ in range(tokens):
        with torch.no_grad():
            token = int(opened.model(ids, use_cache=False).logits[0, -1].argmax())
        if token == opened.tokenizer.eos_token_id:
            break
        said.append(token)
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
        if "stone" in opened.tokenizer.decode(said):
            break
    return said


def watched(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every row that the model is given from now on, without padding."""
    rows: list[list[int]] = []
    forward = opened.model.forward

    def watch(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.extend(input_ids.tolist())
        return forward(input_ids, *args, **kwargs)

    monkeypatch.setattr(opened.model, "forward", watch)
    return rows


@pytest.mark.parametrize("make", [functools.partial(keyshift_model, mechanism="gqa"), llama])
def test_every_request_begins_with_exactly_one_bos(
    make: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_checkpoint(make(tmp_path / "m"), "cpu", "auto")
    model = asked(opened, tmp_path / "answers")
    rows = watched(opened, monkeypatch)
    bos = opened.tokenizer.bos_token
    contexts = ["", "The cat", f"{bos}The bird", text(random.Random(2), 900)]
    model.loglikelihood([question("loglikelihood", context, " sings.") for context in contexts])
    model.loglikelihood_rolling([question("loglikelihood_rolling", "The old water runs.")])
    assert len(rows) == len(contexts) + 1
    assert all(row.count(0) == 1 and row[0] == 0 for row in rows)
    assert max(map(len, rows)) == opened.positions  # the long one is cut behind its BOS


def test_a_tokenizer_without_bos_gets_none_for_others_and_the_separator_for_ours(tmp_path: Path) -> None:
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().backend_tokenizer, eos_token="<|endoftext|>"
    )
    name = llama(tmp_path / "llama")
    tokens.save_pretrained(name)
    (Path(name) / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    assert open_checkpoint(name, "cpu", "auto").start is None
    ours = keyshift_model(tmp_path / "ours", "gqa")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (Path(ours) / file).write_bytes((Path(name) / file).read_bytes())
    assert open_checkpoint(ours, "cpu", "auto").start == 0


def test_cut_requests_are_counted_also_when_answers_are_read_again(tmp_path: Path) -> None:
    name = keyshift_model(tmp_path / "m", "gva-shift", max_position_embeddings=100)
    opened = open_checkpoint(name, "cpu", "auto")
    settings = {"until": ["stone"], "do_sample": False, "max_gen_toks": 8}
    cut = sum(len(opened.encode(context + answer)) - 1 > 100 for context, answer in pairs())
    cut_contexts = sum(len(opened.encode(context)) > 100 - 8 for context, _ in pairs())
    assert 0 < cut < len(pairs())
    assert 0 < cut_contexts < len(pairs())
    found = []
    for _ in range(2):
        model = asked(opened, tmp_path / "answers", 4)
        found.append(model.loglikelihood([question("loglikelihood", *pair) for pair in pairs()]))
        assert model.truncated["questions"] == cut
        found.append(model.generate_until([question("generate_until", c, settings) for c, _ in pairs()]))
        assert model.truncated["questions"] == cut + cut_contexts
        assert model.requests["questions"] == 2 * len(pairs())
        model.answers.__exit__()
    assert found[:2] == found[2:]


def test_what_does_not_fit_at_all_is_refused_in_a_line(tmp_path: Path) -> None:
    opened = open_checkpoint(keyshift_model(tmp_path / "m", "gqa", max_position_embeddings=16), "cpu", "auto")
    model = asked(opened, tmp_path / "answers")
    with pytest.raises(UserError, match=r"answer of .* tokens, and .* has positions for 16"):
        model.loglikelihood([question("loglikelihood", "A", text(random.Random(0), 60))])
    with pytest.raises(UserError, match="generates up to 256 tokens"):
        model.generate_until([question("generate_until", "A", {"until": ["B"]})])


# Answers kept


def test_answers_are_read_again_and_another_checkpoint_has_its_own(mirror: Path, tmp_path: Path) -> None:
    name = keyshift_model(tmp_path / "m", "gqa-shift")
    first = evaluate([name], "arc_easy,hendrycks_math_algebra", mirror, tmp_path / "out")
    forward = KeyshiftForCausalLM.forward
    KeyshiftForCausalLM.forward = None  # type: ignore[method-assign]  # nothing may be asked again
    try:
        again = evaluate([name], "arc_easy,hendrycks_math_algebra", mirror, tmp_path / "out")
    finally:
        KeyshiftForCausalLM.forward = forward  # type: ignore[method-assign]
    assert again.scores == first.scores
    keyshift_model(tmp_path / "m", "gqa-shift", seed=1)
    other = evaluate([name], "arc_easy,hendrycks_math_algebra", mirror, tmp_path / "out")
    fresh = evaluate([name], "arc_easy,hendrycks_math_algebra", mirror, tmp_path / "elsewhere")
    assert other.scores == fresh.scores
    assert other.answers != first.answers
    assert len(list((tmp_path / "out/answers").iterdir())) == 2

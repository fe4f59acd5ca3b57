"""A whole comparison, small: on the task and on text; interrupted, resumed, repeated; report and errors."""

import json
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
import torch

from keyshift.circuits import load_model
from keyshift.compare import Hooks, compare
from keyshift.data import load_tokenizer, prepare
from keyshift.errors import UserError
from keyshift.recipe import Recipe, parse_recipe
from keyshift.report.paired import differences
from keyshift.results import Report
from keyshift.tasks import RepeatedTokens
from keyshift.training import MixedSource, TaskSource, TextSource

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
VARIANTS = {
    "GQA": {},
    "GQA + shift": {"shift": "kv"},
    "GVA + shift": {"attention": "gva", "position": "decoupled_rope", "qk_rope_head_dim": 4, "shift": "kv"},
}
TRAINING = {"steps": 12, "batch_size": 4, "eval_steps": 4, "eval_batches": 2, "save_steps": 5}


def recipe(**changes) -> Recipe:
    content = {
        "title": "small",
        "seeds": 2,
        "task": {"name": "induction", "vocab_size": 24, "sequence_length": 16},
        "training": TRAINING,
        "model": SMALL,
        "variants": VARIANTS,
    }
    return parse_recipe({**content, **changes}, "test")


def numbers(report: Report) -> list:
    """Everything in a report that must not depend on when and how fast it was made."""
    return [
        (variant.name, variant.parameters, run.seed, run.status, run.curve, run.train_loss, run.shift_weights)
        for variant in report.variants
        for run in variant.runs
    ]


def test_a_comparison_measures_every_variant_with_every_seed(tmp_path):
    report = compare(recipe(), tmp_path)
    assert report.complete
    for variant in report.variants:
        assert [run.seed for run in variant.runs] == [0, 1]
        assert all(
            run.status == "finished" and [p.step for p in run.curve] == [4, 8, 12] for run in variant.runs
        )
        assert variant.cache_bytes_per_token_measured == variant.cache_bytes_per_token
        assert variant.runs[0].decode_ms_per_token > 0
        assert all(run.train_tokens_per_second > 0 for run in variant.runs)
        assert bool(variant.runs[0].shift_weights) == ("shift" in variant.name)
    by_name = {variant.name: variant for variant in report.variants}
    # one layer, float32: GQA keeps 2 G d_h = 16 scalars, GVA G d_h + d_r = 12, the shift none
    assert [by_name[name].cache_bytes_per_token for name in VARIANTS] == [64, 64, 48]
    assert by_name["GQA + shift"].shift_parameters == 4
    assert by_name["GQA + shift"].parameters == by_name["GQA"].parameters + 4
    assert report.variants[0].runs[0].curve != report.variants[0].runs[1].curve
    stored = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert numbers(stored) == numbers(report)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "figures").glob("*.png"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The numbers of the recipe, run in one go."""
    return numbers(compare(recipe(), tmp_path_factory.mktemp("whole")))


def test_the_same_recipe_gives_the_same_numbers(tmp_path, whole):
    assert numbers(compare(recipe(), tmp_path)) == whole


@pytest.mark.parametrize("after", [3, 17, 30])
def test_an_interrupted_comparison_resumes_to_the_same_curves(tmp_path, whole, after):
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls > after

    partial = compare(recipe(), tmp_path / "parts", hooks=Hooks(stop=stop))
    assert not partial.complete
    assert (tmp_path / "parts" / "report.html").exists()
    resumed = compare(recipe(), tmp_path / "parts", resume=True)
    assert numbers(resumed) == whole
    assert resumed.complete


def test_finished_runs_are_not_repeated(tmp_path):
    first = compare(recipe(), tmp_path)
    repeated = []
    hooks = Hooks(progress=lambda run, progress: repeated.append(run))
    again = compare(recipe(), tmp_path, resume=True, hooks=hooks)
    assert repeated == []
    # nor is decoding timed anew, on a machine that may be busier now
    assert [v.model_dump() for v in again.variants] == [v.model_dump() for v in first.variants]


def test_a_diverging_variant_is_reported_and_the_others_finish(tmp_path):
    hot = {**TRAINING, "learning_rate": 1e25}
    report = compare(recipe(training=hot, seeds=1, variants={"GQA": {}}), tmp_path)
    (run,) = report.variants[0].runs
    assert run.status == "diverged"
    assert "step" in run.message
    assert report.complete


def corpus(folder: Path) -> Path:
    folder.mkdir()
    words = ["attention", "value", "key", "query", "token", "shift", "cache", "group", "head", "rotary"]
    for index in range(60):
        lines = [" ".join(words[(index * j + k) % 10] for k in range(9)) for j in range(1, 20)]
        (folder / f"{index}.txt").write_text(f"document {index}\n" + "\n".join(lines))
    return folder


def text_recipe(paths: list[str], task: dict | None = None, **changes) -> Recipe:
    data = {"paths": paths, "vocab_size": 300, "sequence_length": 32, "validation_fraction": 0.2}
    return recipe(task=task, data={**data, **changes}, seeds=1)


def test_text_is_compared_in_nats_and_bits_per_byte(tmp_path):
    report = compare(text_recipe([str(corpus(tmp_path / "text"))]), tmp_path / "out")
    assert report.kind == "text"
    for variant in report.variants:
        first, *_, last = variant.runs[0].curve
        assert last.loss < first.loss
        assert last.accuracy is None
        ratio = {round(point.bits_per_byte / point.loss, 9) for point in variant.runs[0].curve}
        assert len(ratio) == 1
    for checkpoint in (tmp_path / "out").glob("runs/*/seed-0/checkpoint-*"):
        own, trained = load_tokenizer(checkpoint), load_tokenizer(tmp_path / "out/data/tokenizer")
        assert own.get_vocab() == trained.get_vocab()
        assert load_model(str(checkpoint)).bos == own.bos_token_id


def test_text_mixed_with_a_task_is_measured_on_both(tmp_path):
    chosen = text_recipe([str(corpus(tmp_path / "text"))], task={"name": "repeated"}, task_share=0.25)
    calls = iter([False] * 15 + [True] * 1000)  # into the second run
    assert not compare(chosen, tmp_path / "parts", hooks=Hooks(stop=lambda: next(calls))).complete
    report = compare(chosen, tmp_path / "parts", resume=True)
    assert numbers(report) == numbers(compare(chosen, tmp_path / "whole"))
    assert report.kind == "text"
    assert {"train", "chance_level", "guessing"} <= report.data.keys()
    for variant in report.variants:
        first, *_, last = variant.runs[0].curve
        assert last.loss < first.loss
        assert last.bits_per_byte > 0
        assert 0 <= last.accuracy <= 1
    assert (tmp_path / "whole/figures/accuracy.png").exists()
    page = (tmp_path / "whole/report.html").read_text()
    assert "bits per byte) and an accuracy of" in page
    assert '<th scope="col">Accuracy</th>' in page


def test_a_share_of_every_batch_is_the_task(tmp_path):
    text = prepare(
        [str(corpus(tmp_path / "text"))],
        tmp_path / "data",
        tokenizer=None,
        vocab_size=300,
        sequence_length=32,
        batch_size=8,
    )
    task = RepeatedTokens(text.vocab_size, 32)
    source = MixedSource(TextSource(text, 32), TaskSource(task), share=0.25)
    assert (source.vocab_size, source.sequence_length) == (text.vocab_size, 32)
    for step in (0, 1):
        mixed, again = source.train_batch(3, step, 8), source.train_batch(3, step, 8)
        parts = text.train.batch(step, 6, 32, 3), task.batch(3, step, 2)
        for name in ("input_ids", "labels"):
            assert torch.equal(mixed[name], torch.cat([part[name] for part in parts]))
        assert torch.equal(mixed["position_ids"][:6], parts[0]["position_ids"])
        assert (mixed["position_ids"][6:] == torch.arange(32)).all()
        assert mixed.keys() == again.keys()
        assert all(torch.equal(mixed[name], again[name]) for name in mixed)


def test_a_task_that_contradicts_the_trained_tokenizer_is_refused_by_name(tmp_path):
    task = {"name": "repeated", "vocab_size": 5000}
    chosen = text_recipe([str(corpus(tmp_path / "text"))], task, task_share=0.5, vocab_size=5000)
    with pytest.raises(UserError, match=r"task\.vocab_size=5000 contradicts the text's vocab_size=\d+"):
        compare(chosen, tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [str(folder / "nowhere")], "nowhere"),
        (lambda folder: [str(folder)], "text"),
    ],
)
def test_bad_text_is_refused_before_anything_is_trained(tmp_path, make, message):
    folder = tmp_path / "text"
    folder.mkdir()
    with pytest.raises(UserError) as caught:
        compare(text_recipe(make(folder)), tmp_path / "out")
    assert message in str(caught.value)
    assert [path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith(".")] == []


def test_a_folder_in_use_or_with_other_content_is_refused(tmp_path):
    busy, foreign, file = tmp_path / "busy", tmp_path / "foreign", tmp_path / "file"
    busy.mkdir()
    with filelock.FileLock(busy / ".lock"), pytest.raises(UserError, match="in use by another run"):
        compare(recipe(), busy)
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        compare(recipe(), foreign)
    file.write_text("a file")
    with pytest.raises(UserError, match="cannot be used as a folder"):
        compare(recipe(), file)


def test_results_are_neither_overwritten_nor_mixed(tmp_path):
    compare(recipe(seeds=1, variants={"GQA": {}}), tmp_path)
    with pytest.raises(UserError, match="--resume"):
        compare(recipe(seeds=1, variants={"GQA": {}}), tmp_path)
    with pytest.raises(UserError, match=r"different recipe \(variants"):
        compare(recipe(seeds=1), tmp_path, resume=True)


def test_words_and_comparisons_of_a_recipe_may_change_when_its_runs_are_done(tmp_path):
    compare(recipe(seeds=1), tmp_path)
    first, second, *_ = VARIANTS
    asked = {"of": first, "against": second, "metric": "accuracy"}
    changed = recipe(seeds=1, title="anew", verdict="as expected", comparisons=[asked])
    trained: list[str] = []
    report = compare(
        changed, tmp_path, resume=True, hooks=Hooks(finished=lambda run, _: trained.append(run.name))
    )
    assert trained == []
    assert (report.title, len(differences(report))) == ("anew", 1)


def test_ctrl_c_leaves_a_partial_report_and_a_resumable_run(tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "keyshift.cli",
        "compare",
        "induction",
        "--out",
        str(out),
        "--seeds",
        "1",
    ]
    quick = [
        "--set",
        "training.save_steps=1000",
        "--set",
        "model.hidden_size=16",
        "--set",
        "training.batch_size=2",
    ]
    process = subprocess.Popen(
        [*command, *quick, "--steps", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: any(out.glob("runs/*/seed-0")), process)
    time.sleep(2)
    process.send_signal(2)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    report = Report.model_validate_json((out / "report.json").read_text())
    assert not report.complete
    assert [run.status for variant in report.variants for run in variant.runs].count("interrupted") == 1
    (checkpoint,) = out.glob("runs/*/seed-0/checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == int(checkpoint.name.split("-")[1]) > 0


def wait_for(condition, process, seconds=90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_changed_text_is_not_mixed_into_old_results(tmp_path):
    text = corpus(tmp_path / "text")
    chosen = text_recipe([str(text)])
    compare(chosen, tmp_path / "out")
    (text / "0.txt").write_text("other words " * 300)
    kept = (tmp_path / "out/data/meta.json").read_text()
    with pytest.raises(UserError, match="made from other text"):
        compare(chosen, tmp_path / "out", resume=True)
    assert (tmp_path / "out/data/meta.json").read_text() == kept


def test_a_damaged_store_is_noticed(tmp_path):
    chosen = text_recipe([str(corpus(tmp_path / "text"))])
    compare(chosen, tmp_path / "out")
    tokens = tmp_path / "out/data/00000.train.tokens"
    tokens.write_bytes(tokens.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged"):
        compare(chosen, tmp_path / "out", resume=True)


def test_what_a_killed_run_left_behind_is_cleared_away(tmp_path):
    (tmp_path / ".data-abc").mkdir()
    (tmp_path / ".data-abc" / "train.tokens").write_text("half")
    (tmp_path / ".recipe.json.tmp").write_text("{")
    assert compare(recipe(seeds=1, variants={"GQA": {}}), tmp_path).complete
    assert not list(tmp_path.glob(".*.tmp")) + list(tmp_path.glob(".data-*"))


@pytest.mark.parametrize("name", ["recipe.json", "runs/gqa/seed-0/result.json"])
def test_a_damaged_record_is_named(tmp_path, name):
    chosen = recipe(seeds=1, variants={"GQA": {}})
    compare(chosen, tmp_path)
    path = tmp_path / name
    path.write_text(path.read_text()[:20])
    with pytest.raises(UserError, match="is damaged") as caught:
        compare(chosen, tmp_path, resume=True)
    assert str(path) in str(caught.value)


def test_a_stop_while_text_is_read_leaves_nothing(tmp_path):
    hooks = Hooks(stop=lambda: True)
    with pytest.raises(KeyboardInterrupt):
        compare(text_recipe([str(corpus(tmp_path / "text"))]), tmp_path / "out", hooks=hooks)
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {".lock", ".data.lock"}


def test_a_failing_run_leaves_a_report_and_its_own_error(tmp_path):
    """Whatever stops a comparison is what the user hears of, and what was measured before is kept."""
    chosen = recipe(seeds=1)
    calls = iter([False] * 20 + [True] * 1000)  # into the second run
    compare(chosen, tmp_path, hooks=Hooks(stop=lambda: next(calls)))
    (broken,) = [
        p for p in tmp_path.glob("runs/*/seed-0/checkpoint-*") if not (p.parent / "result.json").exists()
    ]
    (broken / "optimizer.pt").unlink()
    (tmp_path / "report.html").unlink()
    with pytest.raises(UserError, match="cannot be read") as caught:
        compare(chosen, tmp_path, resume=True)
    assert str(broken) in str(caught.value)
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert [variant.runs[0].status for variant in report.variants] == ["finished", "pending", "pending"]
    assert (tmp_path / "report.html").exists()

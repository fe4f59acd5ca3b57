"""Steps that go wrong: a NaN or a spike ends the run, or is left out and counted; norms are the true ones."""

import json
import math

import pytest
import torch
from test_training import SETTINGS, SOURCE, equal_weights, model

from keyshift import NonFiniteLoss, UserError
from keyshift.recipe import Engine, Training
from keyshift.training import TaskSource, newest_checkpoint, train
from keyshift.training.guard import PATIENCE

SKIPPING = SETTINGS.model_copy(update={"unstable": "skip"})


class Unanswerable(TaskSource):
    """Batches of some steps have no label that counts: their mean loss is 0 / 0."""

    def __init__(self, *steps: int):
        super().__init__(SOURCE.task)
        self.steps = steps

    def train_batch(self, seed, step, batch_size):
        batch = super().train_batch(seed, step, batch_size)
        if step in self.steps:
            batch["labels"] = torch.full_like(batch["labels"], -100)
        return batch


class Surprising(TaskSource):
    """One step's answers are all wrong."""

    def train_batch(self, seed, step, batch_size):
        batch = super().train_batch(seed, step, batch_size)
        if step == 40:
            labels = batch["labels"]
            batch["labels"] = torch.where(labels == -100, labels, 23 - labels)
        return batch


def test_a_nan_ends_the_run_and_the_last_checkpoint_is_kept(tmp_path):
    with pytest.raises(NonFiniteLoss, match="loss is nan at step 8"):
        train(model(), Unanswerable(7), SETTINGS, tmp_path, seed=0)
    assert newest_checkpoint(tmp_path).name == "checkpoint-5"


def test_a_step_with_a_nan_is_left_out_and_counted(tmp_path):
    """Against a plain loop that leaves the same steps out, optimiser state and decay included."""
    trained, plain = model(), model()
    outcome = train(trained, Unanswerable(3, 7), SKIPPING, tmp_path, seed=1)
    assert outcome.skipped == 2
    assert outcome.steps == SETTINGS.steps
    decayed = [p for n, p in plain.named_parameters() if "norm" not in n]
    others = [p for n, p in plain.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in set(range(SETTINGS.steps)) - {3, 7}:
        plain(**SOURCE.train_batch(1, step, 4)).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    for (name, a), b in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_the_count_of_steps_left_out_survives_a_resumption(tmp_path):
    asked = iter([False] * 5 + [True])
    train(model(), Unanswerable(3, 7), SKIPPING, tmp_path / "parts", seed=1, stop=lambda: next(asked))
    resumed, whole = model(seed=9), model()
    outcome = train(resumed, Unanswerable(3, 7), SKIPPING, tmp_path / "parts", seed=1, resume=True)
    assert outcome.skipped == 2
    train(whole, Unanswerable(3, 7), SKIPPING, tmp_path / "whole", seed=1)
    assert equal_weights(resumed, whole)


def test_what_does_not_mend_itself_ends_the_run_though_steps_may_be_left_out(tmp_path):
    settings = SKIPPING.model_copy(update={"steps": 3 * PATIENCE, "save_steps": 1000, "eval_steps": 1000})
    with pytest.raises(NonFiniteLoss, match=f"as in the {PATIENCE - 1} steps before") as caught:
        train(model(), Unanswerable(*range(20, 1000)), settings, tmp_path, seed=0)
    assert caught.value.step == 20 + PATIENCE


@pytest.mark.parametrize("unstable", ["stop", "skip"])
def test_a_spike_of_the_loss_is_treated_as_the_recipe_says(tmp_path, unstable):
    update = {"steps": 50, "eval_steps": 1000, "spike_zscore": 5.0, "unstable": unstable}
    settings = SETTINGS.model_copy(update={**update, "learning_rate": 0.02, "batch_size": 32})
    source = Surprising(SOURCE.task)
    if unstable == "stop":
        with pytest.raises(NonFiniteLoss, match="standard deviations above its recent mean") as caught:
            train(model(), source, settings, tmp_path, seed=0)
        assert caught.value.step == 41
    else:
        assert train(model(), source, settings, tmp_path, seed=0).skipped == 1


def test_the_norm_that_is_logged_is_that_before_clipping(tmp_path):
    settings = SETTINGS.model_copy(update={"steps": 10, "max_grad_norm": 1e-3})
    train(model(), SOURCE, settings, tmp_path, seed=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line["grad_norm"] for line in lines if "grad_norm" in line]
    assert min(logged) > 0.1  # clipped to a thousandth it would be 0.001


@pytest.mark.parametrize("clipping", ["norm", "zclip"])
def test_clipping_goes_on_bit_by_bit_after_a_resumption(tmp_path, clipping):
    """Past ZClip's warm-up, so that its statistics matter."""
    settings = SETTINGS.model_copy(
        update={"steps": 60, "clipping": clipping, "spike_zscore": 50.0, "eval_steps": 1000}
    )
    whole, resumed = model(), model(seed=7)
    train(whole, SOURCE, settings, tmp_path / "whole", seed=0)
    asked = iter([False] * 41 + [True])
    train(model(), SOURCE, settings, tmp_path / "parts", seed=0, stop=lambda: next(asked))
    train(resumed, SOURCE, settings, tmp_path / "parts", seed=0, resume=True)
    assert equal_weights(whole, resumed)


def test_zclip_and_a_fixed_norm_clip_different_steps(tmp_path):
    weights = []
    for clipping in ("norm", "zclip"):
        settings = SETTINGS.model_copy(update={"steps": 60, "clipping": clipping, "eval_steps": 1000})
        trained = model()
        train(trained, SOURCE, settings, tmp_path / clipping, seed=0)
        weights.append(trained.lm_head.weight)
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    "engine", [{"compile": True}, {"gradient_checkpointing": True}, {"micro_batch_size": 1}]
)
def test_how_it_is_computed_does_not_change_what_is_trained(tmp_path, engine):
    gva = {"attention": "gva", "position": "decoupled_rope"}
    plain, other = (model(num_hidden_layers=2, **gva) for _ in range(2))
    train(plain, SOURCE, SETTINGS, tmp_path / "plain", seed=0)
    train(other, SOURCE, SETTINGS, tmp_path / "other", seed=0, engine=Engine(**engine))
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    kept = newest_checkpoint(tmp_path / "other")
    assert equal_weights(type(other).from_pretrained(kept), other)  # no names of torch.compile's in it


def test_bfloat16_trains_nearly_the_same(tmp_path):
    plain, half = model(), model()
    first = train(plain, SOURCE, SETTINGS, tmp_path / "plain", seed=0)
    other = train(half, SOURCE, SETTINGS, tmp_path / "half", seed=0, engine=Engine(precision="bfloat16"))
    losses = [[e["eval_loss"] for e in each.history if "eval_loss" in e] for each in (first, other)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
    assert all(parameter.dtype == torch.float32 for parameter in half.parameters())


def test_the_loss_is_the_mean_over_labels_that_count(tmp_path):
    """Not over all labels of a batch, the first of each row among them, which nothing predicts."""
    settings = Training(steps=10, batch_size=4, learning_rate=1e-9, eval_steps=100)
    start = model()
    train(model(), SOURCE, settings, tmp_path, seed=3, engine=Engine(micro_batch_size=2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    batch = SOURCE.train_batch(3, 9, 4)
    with torch.no_grad():
        logits = start(batch["input_ids"]).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses.keys() == {1, 10}
    assert losses[10] == pytest.approx(expected.item(), abs=1e-5)
    assert math.isfinite(expected)


def test_a_tracker_that_is_not_known_or_not_there_is_said_before_training(tmp_path):
    with pytest.raises(UserError, match="tracker 'tensorbord' is not known; use some of tensorboard"):
        train(model(), SOURCE, SETTINGS, tmp_path, seed=0, trackers=["tensorbord"])
    assert not list(tmp_path.iterdir())

"""The training engine: equal to a plain loop, resumable bit by bit, atomic checkpoints, NaN noticed."""

import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import set_seed

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, NonFiniteLoss, UserError
from keyshift.recipe import Training
from keyshift.tasks import Induction
from keyshift.training import TaskSource, newest_checkpoint, train

SOURCE = TaskSource(Induction(vocab_size=24, sequence_length=16))
SETTINGS = Training(steps=12, batch_size=4, learning_rate=3e-3, eval_steps=4, eval_batches=2, save_steps=5)


def model(seed: int = 0, **fields) -> KeyshiftForCausalLM:
    set_seed(seed)
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return KeyshiftForCausalLM(KeyshiftConfig(**{**sizes, "shift": "kv", **fields}))


def equal_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_the_engine_takes_the_steps_of_a_plain_loop(tmp_path):
    trained, plain = model(), model()
    outcome = train(trained, SOURCE, SETTINGS, tmp_path, seed=1)
    decayed = [p for n, p in plain.named_parameters() if "norm" not in n]
    others = [p for n, p in plain.named_parameters() if "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(SETTINGS.steps):
        loss = plain(**SOURCE.train_batch(1, step, 4)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    for (name, a), b in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    assert outcome.steps == 12
    assert [entry["step"] for entry in outcome.history if "eval_loss" in entry] == [4, 8, 12]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_an_interrupted_run_goes_on_bit_by_bit(tmp_path, schedule):
    settings = SETTINGS.model_copy(update={"schedule": schedule, "warmup_steps": 3})
    whole, parts = model(), model()
    straight = train(whole, SOURCE, settings, tmp_path / "whole", seed=0)
    asked = iter([False] * 6 + [True])
    first = train(parts, SOURCE, settings, tmp_path / "parts", seed=0, stop=lambda: next(asked))
    assert (first.interrupted, first.steps) == (True, 7)
    resumed = model(seed=99)
    second = train(resumed, SOURCE, settings, tmp_path / "parts", seed=0, resume=True)
    assert equal_weights(whole, resumed)
    assert [e for e in straight.history if "eval_loss" in e] == [
        e for e in second.history if "eval_loss" in e
    ]


def test_the_same_seed_gives_the_same_weights(tmp_path):
    runs = [model(), model()]
    for index, each in enumerate(runs):
        train(each, SOURCE, SETTINGS, tmp_path / str(index), seed=3)
    assert equal_weights(*runs)


def test_the_newest_checkpoint_is_a_model_that_loads(tmp_path):
    trained = model()
    train(trained, SOURCE, SETTINGS, tmp_path, seed=0)
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-12"
    assert sorted(path.name for path in tmp_path.glob("*checkpoint*")) == ["checkpoint-12"]
    assert equal_weights(KeyshiftForCausalLM.from_pretrained(checkpoint), trained)


def test_a_nan_stops_training_says_when_and_keeps_the_last_good_checkpoint(tmp_path):
    class Poisoned(TaskSource):
        def train_batch(self, seed, step, batch_size):
            if step == 7:
                with torch.no_grad():
                    broken.lm_head.weight[0, 0] = float("nan")
            return super().train_batch(seed, step, batch_size)

    broken = model()
    with pytest.raises(NonFiniteLoss, match=r"step [789]") as caught:
        train(broken, Poisoned(SOURCE.task), SETTINGS, tmp_path, seed=0)
    assert caught.value.step in (7, 8, 9)
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert checkpoint.name == "checkpoint-5"
    kept = KeyshiftForCausalLM.from_pretrained(checkpoint)
    assert all(bool(torch.isfinite(p).all()) for p in kept.parameters())


def test_clipped_shift_weights_stay_in_range(tmp_path):
    settings = SETTINGS.model_copy(update={"learning_rate": 0.5, "eval_steps": 100})
    clipped, free = model(shift_weights="clip"), model(shift_weights="free")
    train(clipped, SOURCE, settings, tmp_path / "clip", seed=0)
    train(free, SOURCE, settings, tmp_path / "free", seed=0)

    def all_weights(of):
        return torch.cat([p.flatten() for n, p in of.named_parameters() if "_shift" in n])

    assert all_weights(free).min() < 0 or all_weights(free).max() > 1
    assert 0 <= all_weights(clipped).min() <= all_weights(clipped).max() <= 1


def test_matched_keys_start_at_the_queries_rms_on_the_first_batch(tmp_path):
    fields = {"attention": "gva", "position": "decoupled_rope", "qk_rope_head_dim": 4, "num_hidden_layers": 3}
    settings = SETTINGS.model_copy(update={"steps": 1, "learning_rate": 1e-12})
    matched = model(**fields)
    train(matched, SOURCE, settings, tmp_path, seed=0)
    seen = {}

    def look(module, arguments):
        content, rotary = module.q_proj(arguments[0]).unflatten(-1, (2, -1)).split((8, 4), dim=-1)
        keys, _ = module.source.expand(*module.source.project(arguments[0]))
        seen[module.layer_idx] = [rms(keys) / rms(content), rms(module.rope_key(arguments[0])) / rms(rotary)]

    for block in matched.model.layers:
        block.self_attn.register_forward_pre_hook(look)
    matched(SOURCE.train_batch(0, 0, SETTINGS.batch_size)["input_ids"])
    assert sorted(seen) == [0, 1, 2]
    for ratios in seen.values():
        assert ratios == pytest.approx([1.0, 1.0], abs=0.01)


def rms(tensor: torch.Tensor) -> float:
    return tensor.pow(2).mean().sqrt().item()


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "config.json"),
        "keyshift_state.json",
    ],
)
@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path, name, harm):
    asked = iter([False] * 4 + [True])
    train(model(), SOURCE, SETTINGS, tmp_path, seed=0, stop=lambda: next(asked))
    checkpoint = newest_checkpoint(tmp_path)
    assert checkpoint is not None
    path = checkpoint / name
    content = path.read_bytes()
    path.unlink()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cannot be read") as caught:
        train(model(), SOURCE, SETTINGS, tmp_path, seed=0, resume=True)
    assert str(checkpoint) in str(caught.value)


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_training import SETTINGS, SOURCE, model, train
    from keyshift.errors import RunError
    settings = SETTINGS.model_copy(update=dict(save_steps=4))
    def progress(standing):
        if standing.step == 6:  # no file may grow beyond this, so the checkpoint of step 8 fails
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
    try:
        train(model(), SOURCE, settings, Path({out!r}), seed=0, on_progress=progress)
    except RunError as error:
        print(error)
        sys.exit(7)
"""


@pytest.mark.parametrize("limit", [1, pytest.param(3000, marks=pytest.mark.slow), 9000])
def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path, limit):
    script = textwrap.dedent(
        FULL_DISK.format(tests=str(__file__).rsplit("/", 1)[0], out=str(tmp_path), limit=limit)
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert "step 8" in done.stdout
    assert len(done.stdout.strip().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "metrics.jsonl"}
    resumed = model(seed=5)
    train(resumed, SOURCE, SETTINGS, tmp_path, seed=0, resume=True)
    straight = model()
    train(straight, SOURCE, SETTINGS, tmp_path / "straight", seed=0)
    assert equal_weights(resumed, straight)


def test_a_run_ends_once_it_is_accurate_enough(tmp_path):
    settings = SETTINGS.model_copy(update={"steps": 100, "eval_steps": 10})

    def accuracies(wanted: float | None, name: str) -> list[float]:
        chosen = settings.model_copy(update={"until_accuracy": wanted})
        outcome = train(model(), SOURCE, chosen, tmp_path / name, seed=0)
        assert not outcome.interrupted
        assert newest_checkpoint(tmp_path / name).name == f"checkpoint-{outcome.steps}"
        return [entry["eval_accuracy"] for entry in outcome.history if "eval_accuracy" in entry]

    whole = accuracies(None, "whole")
    wanted = sorted(whole)[5]
    until = next(index for index, accuracy in enumerate(whole) if accuracy >= wanted)
    assert 0 < until < 9
    assert accuracies(wanted, "part") == whole[: until + 1]


@pytest.mark.parametrize(("rate", "decay"), [(0.0, None), (10.0, 0.0), (1.0, 0.5)])
def test_shift_weights_have_a_rate_and_a_decay_of_their_own(tmp_path, rate, decay):
    """Against a plain loop with the groups written out; all else is trained as ever."""
    chosen = {"shift_learning_rate": rate, "shift_weight_decay": decay, "warmup_steps": 2}
    settings = SETTINGS.model_copy(update=chosen)
    trained, plain, start = model(), model(), model()
    train(trained, SOURCE, settings, tmp_path, seed=1)
    named = dict(plain.named_parameters())
    shifts = [p for n, p in named.items() if "_shift." in n]
    decayed = [p for n, p in named.items() if "norm" not in n and "_shift." not in n]
    others = [p for n, p in named.items() if "norm" in n]
    own_decay = 0.1 if decay is None else decay
    groups = [
        {"params": decayed, "weight_decay": 0.1, "factor": 1.0},
        {"params": others, "weight_decay": 0.0, "factor": 1.0},
        {"params": shifts, "weight_decay": own_decay, "factor": rate},
    ]
    optimiser = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for step in range(settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * group["factor"] * min(1, step / 2)
        plain(**SOURCE.train_batch(1, step, 4)).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    for (name, a), b in zip(trained.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    moved = [
        n for n, p in start.named_parameters() if not torch.equal(p, dict(trained.named_parameters())[n])
    ]
    assert any("_shift." in name for name in moved) == (rate > 0)

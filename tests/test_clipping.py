"""Clipping: ZClip against a second computation, through JSON, on shards, and in a run with a bad batch."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keyshift import KeyshiftConfig, KeyshiftForCausalLM, UserError
from keyshift.tasks import Induction
from keyshift.training.clipping import Clipper, NormClip, RunningMoments, ZClip, gradient_norm, scale_

NORMS = st.lists(st.floats(0, 1e6), min_size=1, max_size=80)


def expected_norms(
    norms: list[float], threshold: float = 2.5, alpha: float = 0.97, warmup: int = 25
) -> list[float]:
    """What ZClip leaves of each norm, computed the way the paper states it."""
    left = list(norms[:warmup])
    mean, variance = np.mean(left), np.var(left)
    for norm in norms[warmup:]:
        z = (norm - mean) / (np.sqrt(variance) + 1e-6)
        adjusted = norm if z <= threshold else mean + np.sqrt(variance) * threshold**2 / z
        mean = alpha * mean + (1 - alpha) * adjusted
        variance = alpha * variance + (1 - alpha) * (adjusted - mean) ** 2
        left.append(adjusted)
    return left


@given(NORMS, st.integers(1, 30), st.floats(0.5, 4))
def test_zclip_leaves_of_a_norm_what_the_paper_says(norms: list[float], warmup: int, threshold: float):
    clip = ZClip(threshold, warmup=warmup)
    left = [clip.factor(norm) * norm for norm in norms]
    assert left == pytest.approx(expected_norms(norms, threshold, warmup=warmup), rel=1e-6, abs=1e-6)


@given(NORMS, st.integers(1, 30))
def test_no_clipper_ever_makes_a_gradient_larger(norms: list[float], warmup: int):
    for clip in (ZClip(warmup=warmup), NormClip(1.0)):
        factors = [clip.factor(norm) for norm in norms]
        assert all(0 <= factor <= 1 for factor in factors)


@given(NORMS, NORMS, st.integers(1, 30))
def test_a_clipper_goes_on_from_json_bit_by_bit(before: list[float], after: list[float], warmup: int):
    whole, resumed = ZClip(warmup=warmup), ZClip(warmup=warmup)
    for norm in before:
        whole.factor(norm)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [whole.factor(norm) for norm in after] == [resumed.factor(norm) for norm in after]
    assert whole.state_dict() == resumed.state_dict()


@given(NORMS, st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 80))
def test_a_norm_that_is_not_finite_leaves_no_trace(norms: list[float], bad: float, place: int):
    clean, struck = ZClip(warmup=5), ZClip(warmup=5)
    for clip in (clean, struck):
        for step, norm in enumerate(norms):
            if clip is struck and step == place:
                assert clip.factor(bad) == 1.0
            clip.factor(norm)
    assert clean.state_dict() == struck.state_dict()
    assert NormClip(1.0).factor(bad) == 1.0


def test_the_further_out_a_norm_is_the_nearer_to_the_mean_it_ends():
    def left(norm: float) -> float:
        clip = ZClip(warmup=4)
        for each in (0.9, 1.1, 0.9, 1.1):  # mean 1, deviation 0.1
            clip.factor(each)
        return norm * clip.factor(norm)

    ends = [left(norm) for norm in (1.25, 1.5, 2.0, 11.0)]
    assert ends == pytest.approx([1.25, 1.125, 1.0625, 1.00625], rel=1e-4)


@pytest.mark.parametrize(("jump", "learned"), [(4.0, True), (10.0, False)])
def test_a_new_level_of_norms_is_learned_below_the_squared_threshold_only(jump: float, learned: bool):
    """2.5 squared is 6.25 deviations: as the method is stated, and worth knowing."""
    clip = ZClip()
    rng = np.random.default_rng(0)
    for norm in rng.normal(1, 0.1, 500):
        clip.factor(norm)
    factors = [clip.factor(norm) for norm in rng.normal(1 + 0.1 * jump, 0.1, 4000)]
    assert np.mean([factor < 1 for factor in factors[:10]]) > 0.5
    assert (np.mean([factor == 1 for factor in factors[-500:]]) > 0.95) == learned


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.floats(0, 0.99), st.integers(1, 20))
def test_running_moments_are_those_of_numpy_and_then_exponential(
    values: list[float], alpha: float, warmup: int
):
    moments = RunningMoments(alpha, warmup)
    for value in values:
        moments.update(value)
    if len(values) < warmup:
        assert moments.z(1.0) is None
        return
    mean, variance = np.mean(values[:warmup]), np.var(values[:warmup])
    for value in values[warmup:]:
        mean = mean * alpha + value * (1 - alpha)
        variance = variance * alpha + (value - mean) ** 2 * (1 - alpha)
    assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert moments.deviation == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-6)
    assert moments.z(mean + 3) == pytest.approx(3 / (math.sqrt(variance) + 1e-6), rel=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZClip(0), "threshold=0"),
        (lambda: ZClip(alpha=1.0), "alpha=1.0"),
        (lambda: ZClip(warmup=0), "warmup=0"),
        (lambda: NormClip(-1), "max_norm=-1"),
        (lambda: NormClip(1.0).load_state_dict(ZClip().state_dict()), "no state"),
        (lambda: ZClip().load_state_dict({}), "running moments"),
    ],
)
def test_mistakes_are_named(make, message: str):
    with pytest.raises(UserError, match=message):
        make()


# Gradients


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def loss_of(model: nn.Module) -> torch.Tensor:
    inputs = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    return model(inputs).pow(2).sum()


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_the_fixed_norm_is_that_of_torch(max_norm: float):
    ours, theirs = network(), network()
    for model in (ours, theirs):
        loss_of(model).backward()
    total = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    norm = gradient_norm(ours.parameters())
    scale_(ours.parameters(), NormClip(max_norm).factor(norm))
    assert norm == pytest.approx(float(total), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_parameters_without_a_gradient_do_not_count():
    model = network()
    assert gradient_norm(model.parameters()) == 0.0
    scale_(model.parameters(), 0.5)
    next(model.parameters()).grad = torch.full((8, 6), 2.0)
    assert gradient_norm(model.parameters()) == pytest.approx(2 * math.sqrt(48))


def sharded(rank: int, world: int, folder: str) -> None:
    """On each rank: a model in shards with one parameter left whole has the norm of the plain model."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        plain, shards = network(), network()
        mesh = init_device_mesh("cpu", (world,))
        whole = shards[2].bias
        fully_shard(shards, mesh=mesh, ignored_params={whole})
        for model in (plain, shards):
            loss_of(model).backward()
        found = gradient_norm(shards.parameters()), gradient_norm(plain.parameters())
        scale_(shards.parameters(), 0.25)
        kinds = [isinstance(each.grad, DTensor) for each in shards.parameters()]
        equal = all(
            torch.allclose(a.grad.full_tensor() if kind else a.grad, b.grad / 4, atol=1e-6)
            for a, b, kind in zip(shards.parameters(), plain.parameters(), kinds, strict=True)
        )
        Path(folder, f"{rank}.json").write_text(json.dumps([*found, equal, kinds]))
    finally:
        dist.destroy_process_group()


def test_the_norm_of_shards_is_that_of_the_whole_on_every_rank(tmp_path: Path):
    torch.multiprocessing.spawn(sharded, (2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found, wanted, equal, kinds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx(wanted, rel=1e-6)
        assert equal
        assert kinds == [True, True, True, False]


# A run with one bad batch

SPIKE = 60
STEPS = 70


def losses_around_a_spike(clip: Clipper | None) -> tuple[list[float], list[float]]:
    """A tiny model under plain gradient descent; step `SPIKE` has a loss a thousand times as large.

    Returns:
        The loss of every step, as it was before its own update, and the norms that the updates had.
    """
    torch.manual_seed(0)
    task = Induction(vocab_size=24, sequence_length=16)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.1}
    model = KeyshiftForCausalLM(KeyshiftConfig(vocab_size=24, shift="kv", **sizes))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, norms = [], []
    for step in range(STEPS):
        batch: dict[str, Any] = task.batch(0, step, 16)
        loss = model(**batch).loss
        (loss * (1000 if step == SPIKE else 1)).backward()
        norm = gradient_norm(model.parameters())
        factor = 1.0 if clip is None else clip.factor(norm)
        scale_(model.parameters(), factor)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        norms.append(norm * factor)
    return losses, norms


def test_a_spike_is_tamed_by_zclip_and_not_by_a_fixed_norm_at_the_same_threshold():
    unclipped, _ = losses_around_a_spike(None)
    zclip = ZClip(warmup=20)
    tamed, norms = losses_around_a_spike(zclip)
    usual = norms[SPIKE - 20 : SPIKE]
    mean, deviation = float(np.mean(usual)), float(np.std(usual))
    fixed, fixed_norms = losses_around_a_spike(NormClip(mean + 2.5 * deviation))
    assert norms[SPIKE] < mean + deviation  # nearer to the mean than the threshold is
    assert fixed_norms[SPIKE] == pytest.approx(mean + 2.5 * deviation, rel=1e-3)
    assert tamed[SPIKE + 1] < tamed[SPIKE] + 0.2
    assert unclipped[SPIKE + 1] > unclipped[SPIKE] + 1
    assert np.mean(tamed[SPIKE + 1 :]) < np.mean(unclipped[SPIKE + 1 :]) - 1
    assert tamed[:20] == unclipped[:20]  # where nothing stands out, nothing is changed
    assert fixed[:20] != unclipped[:20]

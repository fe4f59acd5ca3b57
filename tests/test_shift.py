"""KV shifting: the shift itself, its weights, and its order with RoPE."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import qmc
from tiny import CASES, Case, assert_close, build, full, tokens
from torch import Tensor

from keyshift import KeyshiftConfig, KeyshiftForCausalLM
from keyshift.attention.rotary import rotate, rotation
from keyshift.attention.shift import Shift, shift_sequence
from keyshift.configuration import CHOICES


def shifted_by_loops(x: Tensor, weights: Tensor, starts: Tensor | None, first_slot: int) -> Tensor:
    """The definition, one number at a time."""
    batch, tokens, groups, width = x.shape
    heads, window = weights.shape
    mixed = torch.zeros(batch, tokens, heads, width, dtype=x.dtype)
    for b in range(batch):
        for t in range(tokens):
            start = 0 if starts is None else int(starts[b, t]) - first_slot
            for back in range(window):
                if t - back >= max(0, start):
                    for h in range(heads):
                        mixed[b, t, h] += weights[h, back] * x[b, t - back, h // (heads // groups)]
    return mixed


@st.composite
def shift_inputs(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor | None, int]:
    batch, length, groups, per_group, width, window = (
        draw(st.integers(1, most)) for most in (3, 7, 3, 3, 3, 4)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(batch, length, groups, width, dtype=torch.float64, generator=generator)
    weights = torch.randn(groups * per_group, window, dtype=torch.float64, generator=generator)
    first_slot = draw(st.integers(0, 5))
    starts = None
    if draw(st.booleans()):
        rows = [[draw(st.integers(0, first_slot + t)) for t in range(length)] for _ in range(batch)]
        starts = torch.tensor(rows).cummax(dim=1).values
    return x, weights, starts, first_slot


@given(shift_inputs())
@settings(max_examples=150, deadline=None)
def test_shift_sequence_equals_its_definition(inputs: tuple[Tensor, Tensor, Tensor | None, int]) -> None:
    torch.testing.assert_close(shift_sequence(*inputs), shifted_by_loops(*inputs), rtol=0, atol=1e-13)


def test_shift_sequence_leaves_its_input_alone() -> None:
    x = torch.randn(2, 5, 2, 3)
    before = x.clone()
    shift_sequence(x, torch.rand(4, 3), None)
    assert torch.equal(x, before)


@pytest.mark.parametrize("starts", [None, torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 4]])])
def test_gradients_of_the_shift(starts: Tensor | None) -> None:
    x = torch.randn(2, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weights: shift_sequence(x, weights, starts), (x, weights))


@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("kind", ["free", "gate", "clip"])
def test_gradients_reach_every_kind_of_weight(kind: str, window: int) -> None:
    shift = initialised(4, window, kind).double()
    x = torch.randn(2, 5, 2, 3, dtype=torch.float64)

    def mixed(weight: Tensor) -> Tensor:
        return torch.func.functional_call(shift, {"weight": weight}, (x, None))

    assert torch.autograd.gradcheck(mixed, shift.weight.detach().requires_grad_())


def initialised(heads: int, window: int, kind: str) -> Shift:
    shift = Shift(heads, window, kind)
    shift.weight.data = shift.initial_weight()
    return shift


@pytest.mark.parametrize("kind", ["free", "gate", "clip"])
def test_first_weight_starts_uniform_and_both_sum_to_one(kind: str) -> None:
    """α1 ~ U(0, 1) and α2 = 1 - α1, for every kind at window 2 (paper, section 3)."""
    weights = initialised(20_000, 2, kind).weights()
    first = weights[:, 0].sort().values
    uniform = torch.linspace(0, 1, len(first))
    assert (first - uniform).abs().max() < 0.015  # Kolmogorov-Smirnov: 1.6 / sqrt(n) at the 1 % level
    torch.testing.assert_close(weights.sum(-1), torch.ones(20_000))


@pytest.mark.parametrize("window", [3, 4])
def test_free_weights_of_wider_windows_start_as_specified(window: int) -> None:
    weights = initialised(20_000, window, "free").weights()
    torch.testing.assert_close(weights[:, :-1].mean(0), torch.full((window - 1,), 0.5), atol=0.01, rtol=0)
    assert weights[:, :-1].min() >= 0
    assert weights[:, :-1].max() <= 1
    torch.testing.assert_close(weights.sum(-1), torch.ones(20_000))


@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("init", ["spread", "leaning", "identity"])
def test_every_start_sums_to_one(window: int, init: str) -> None:
    shift = Shift(16, window, "free", init)
    weights = shift.initial_weight()
    assert weights.shape == (16, window)
    torch.testing.assert_close(weights.sum(-1), torch.ones(16))


def test_identity_changes_nothing_and_leaning_keeps_at_least_half() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 5, 3)
    identity = Shift(5, 3, "free", "identity")
    identity.weight.data = identity.initial_weight()
    assert torch.equal(identity(x, None), x)
    leaning = Shift(10_000, 2, "gate", "leaning")
    leaning.weight.data = leaning.initial_weight()
    first = leaning.weights()[:, 0].detach()
    assert first.min() >= 0.5
    assert abs(float(first.mean()) - 0.75) < 0.01


@pytest.mark.parametrize("case", [case for case in CASES if case.shift != "none"], ids=str)
@pytest.mark.parametrize("init", CHOICES["shift_init"])
def test_at_equal_seeds_a_shift_leaves_every_other_weight_as_it_is_without_one(case: Case, init: str) -> None:
    """So comparisons paired by seed start from the same model; and no two layers or roles draw alike."""
    if init == "identity" and case.shift_weights == "gate":
        pytest.skip("refused")
    torch.manual_seed(0)
    plain = KeyshiftForCausalLM(case.config(shift="none")).state_dict()
    torch.manual_seed(0)
    shifted = KeyshiftForCausalLM(case.config(shift_init=init)).state_dict()
    for name, weight in plain.items():
        assert torch.equal(shifted[name], weight), name
    if init in ("uniform", "leaning"):
        drawn = [tuple(shifted[name].flatten().tolist()) for name in shifted if name not in plain]
        assert len(set(drawn)) == len(drawn)


def test_spread_has_no_luck_in_it_and_fills_the_square_better_than_chance() -> None:
    """Over layers and heads (α1, β1) is as even as a lattice: star discrepancy against that of a draw."""
    layers, heads = 6, 4
    keys = torch.cat(
        [Shift(heads, 2, "free", "spread", "key", layer).initial_weight() for layer in range(layers)]
    )
    values = torch.cat(
        [Shift(heads, 2, "free", "spread", "value", layer).initial_weight() for layer in range(layers)]
    )
    points = torch.stack((keys[:, 0], values[:, 0]), dim=1).numpy()
    assert len({tuple(point) for point in points.tolist()}) == layers * heads
    even = qmc.discrepancy(points)
    drawn = [qmc.discrepancy(np.random.default_rng(seed).random(points.shape)) for seed in range(200)]
    assert even < np.quantile(drawn, 0.05)
    again = Shift(heads, 2, "free", "spread", "key", 3).initial_weight()
    assert torch.equal(again, keys[12:16])


@pytest.mark.parametrize("init", CHOICES["shift_init"])
def test_a_model_starts_every_shift_as_its_config_says(init: str) -> None:
    config = KeyshiftConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, shift="qkv", shift_init=init
    )
    model = KeyshiftForCausalLM(config)
    shifts = [module for module in model.modules() if isinstance(module, Shift)]
    first = torch.cat([shift.weights()[:, 0] for shift in shifts])
    assert len(shifts) == 9
    if init == "identity":
        assert (first == 1).all()
    else:
        assert len(first.unique()) == len(first)
        assert first.min() >= (0.5 if init == "leaning" else 0)


@pytest.mark.parametrize("window", [2, 3, 4])
def test_gate_weights_are_positive_and_sum_to_one_whatever_is_learned(window: int) -> None:
    shift = Shift(50, window, "gate")
    torch.nn.init.normal_(shift.weight, std=10)
    weights = shift.weights()
    assert weights.shape == (50, window)
    assert weights.min() >= 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))


def test_gate_of_window_two_is_a_sigmoid() -> None:
    shift = initialised(8, 2, "gate")
    torch.testing.assert_close(shift.weights()[:, 0], shift.weight[:, 0].sigmoid())


@pytest.mark.parametrize("window", [2, 3, 4])
def test_clip_starts_and_stays_between_zero_and_one(window: int) -> None:
    shift = initialised(1000, window, "clip")
    assert shift.weight.min() >= 0
    assert shift.weight.max() <= 1
    inside = shift.weight.detach().clone()
    shift.constrain_()
    assert torch.equal(shift.weight, inside)
    with torch.no_grad():
        shift.weight[0, :2] = torch.tensor([-0.5, 1.5])
    shift.constrain_()
    assert shift.weight[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["free", "gate"])
def test_constrain_leaves_other_kinds_alone(kind: str) -> None:
    shift = Shift(4, 2, kind)
    torch.nn.init.constant_(shift.weight, 7.0)
    shift.constrain_()
    assert (shift.weight == 7).all()


def test_model_constrains_all_its_layers() -> None:
    case = next(case for case in CASES if case.shift == "kv" and case.shift_weights == "clip")
    model = build(case).__class__(case.config())
    shifts = [module for module in model.modules() if isinstance(module, Shift)]
    for shift in shifts:
        torch.nn.init.constant_(shift.weight, 2.0)
    model.constrain_()
    assert len(shifts) == 2 * case.config().num_hidden_layers
    assert all((shift.weight == 1).all() for shift in shifts)


@pytest.mark.parametrize("offset", [0, 5000])
def test_turning_the_query_back_equals_shifting_the_key_before_rope(offset: int) -> None:
    """score_ij = Σ_m α_m (R_{i-m} q_i) · κ_{j-m}, to rounding in float64, at any position."""
    length, width, window = 10, 8, 3
    queries, keys = torch.randn(2, 1, length, 1, width, dtype=torch.float64)
    weights = torch.randn(1, window, dtype=torch.float64)
    positions = torch.arange(offset, offset + length)[None]

    def turn(x: Tensor, back: int = 0) -> Tensor:
        return rotate(x, rotation(positions - back, width, 1e4, torch.float64))[0, :, 0]

    shifted_first = turn(queries) @ turn(shift_sequence(keys, weights, None)).T
    from_raw = torch.zeros(length, length, dtype=torch.float64)
    for back in range(window):
        scores = turn(queries, back) @ turn(keys).T
        from_raw[:, back:] += weights[0, back] * scores[:, : length - back]
    assert (from_raw - shifted_first).abs().max() <= 1e-12


def test_shift_and_rope_do_not_commute() -> None:
    """The paper says that they do; RoPE at t of K_{t-1} is not RoPE at t-1 of K_{t-1}."""
    keys, weights = torch.randn(1, 6, 1, 8), torch.tensor([[0.5, 0.5]])
    by = rotation(torch.arange(6)[None], 8, 1e4)
    before = rotate(shift_sequence(keys, weights, None), by)
    after = shift_sequence(rotate(keys, by), weights, None)
    assert (before - after).abs().max() > 0.1


@pytest.mark.parametrize("case", [case for case in CASES if case.shift in ("kv", "qkv")], ids=str)
def test_a_document_in_a_pack_equals_the_document_alone(case: Case) -> None:
    lengths = [1, 4, 2, 1, 3]
    ids, model = tokens(2, sum(lengths)), build(case)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = full(model, ids, position_ids=positions)
    for part, alone in zip(packed.split(lengths, 1), ids.split(lengths, 1), strict=True):
        assert_close(part, full(model, alone))

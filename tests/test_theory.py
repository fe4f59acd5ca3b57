"""The theorems, each number by a second way of computing it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keyshift import KeyshiftConfig
from keyshift.attention.frame import build_frame
from keyshift.attention.module import Attention
from keyshift.attention.rotary import rotate, rotation
from keyshift.errors import UserError
from keyshift.theory import (
    absorption,
    decoded,
    flow,
    init_scale,
    learning,
    logits,
    machine,
    mask,
    one_layer,
    order,
    score_shift,
    simulation,
    two_layers,
    virtual,
)
from keyshift.theory.handmade import causal, frame_of, matched, strictly_earlier
from keyshift.theory.learning import Weights
from keyshift.theory.results import Construction
from keyshift.theory.uncertainty import confidence, standard_error

weight = st.floats(-3, 3)
weights = st.builds(Weights, weight, weight, weight, weight)


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


def sequence(length: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Induction heads, by one layer and by two


def machine_by_loops(x: np.ndarray, temperature: float, slope: float) -> np.ndarray:
    """Definition 1, places counted from 1 as there."""
    length = len(x)
    at = {place: x[place - 1] for place in range(1, length + 1)}
    places = range(2, length)
    scores = np.array([at[length] @ at[s - 1] / temperature - slope * abs(length - s) for s in places])
    return sum(share * at[s] for share, s in zip(softmax(scores), places, strict=True))


@given(st.integers(3, 12), st.integers(1, 5), st.floats(0.3, 4), st.floats(0, 2))
@settings(max_examples=50, deadline=None)
def test_the_machine_is_definition_1(length: int, width: int, temperature: float, slope: float) -> None:
    x = sequence(length, width, seed=length)
    found = machine.induction_heads(x, temperature, slope)
    np.testing.assert_allclose(found, machine_by_loops(x.numpy(), temperature, slope), atol=1e-13)


@given(st.integers(3, 20), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_shifted_keys_are_the_machine_on_its_support_only(length: int, width: int) -> None:
    x = sequence(length, width, seed=width)
    wanted = machine.induction_heads(x, machine.TEMPERATURE, machine.SLOPE)
    with torch.no_grad():
        same = one_layer.shifted_keys(x, matched(length))
        ordinary = one_layer.shifted_keys(x, causal(length))
    torch.testing.assert_close(same, wanted, rtol=0, atol=1e-13)
    scores = [0.0, *(x[:-1] @ x[-1] / machine.TEMPERATURE).tolist()]  # the first key is zero
    distances = np.arange(length - 1, -1, -1)
    by_hand = softmax(np.array(scores) - machine.SLOPE * distances) @ x.numpy()
    np.testing.assert_allclose(ordinary, by_hand, atol=1e-13)


def two_layers_by_hand(x: np.ndarray, copy_slope: float, construction: str) -> np.ndarray:
    """What the two layers should compute, without modules: copies, then attention over places 2 … L - 1."""
    length = len(x)
    copies = np.zeros_like(x)
    for s in range(length):
        last = s if construction != "earlier" else max(0, s - 1)
        shares = softmax(np.array([-copy_slope * abs(s - t) for t in range(last + 1)]))
        copies[s] = shares @ x[: last + 1]
    if construction == "undone":
        copies = (copies / (1 - math.exp(-copy_slope)) - x) * math.exp(copy_slope)
    places = np.arange(1, length - 1)
    scores = copies[places] @ x[-1] / machine.TEMPERATURE - machine.SLOPE * (length - 1 - places)
    return softmax(scores) @ x[places]


@pytest.mark.parametrize("construction", two_layers.CONSTRUCTIONS)
@pytest.mark.parametrize("copy_slope", [0.5, 3.0, 6.0])
def test_two_layers_by_hand(construction: Construction, copy_slope: float) -> None:
    for x in machine.sequences(4):
        with torch.no_grad():
            found = two_layers.smear_and_match(x, copy_slope, construction, matched(len(x)))
        np.testing.assert_allclose(found, two_layers_by_hand(x.numpy(), copy_slope, construction), atol=1e-11)


def test_the_copying_error_falls_as_the_theorem_says_but_not_under_an_ordinary_mask() -> None:
    earlier, ordinary, undone = (
        two_layers.copy_errors(name, (8, 11, 14)) for name in two_layers.CONSTRUCTIONS
    )
    for falling in (earlier, undone):
        slope = two_layers.fitted_slope(falling)
        assert slope.value == pytest.approx(-1, abs=1e-3)
    assert min(ordinary[-1].errors) > 0.01
    assert two_layers.support_error(14) > 0.1
    assert two_layers.key_norm(14, "undone") == pytest.approx(math.sqrt(2) * math.exp(14), rel=1e-3)
    assert two_layers.key_norm(14, "earlier") == 1


def test_the_frame_is_that_of_a_model_but_for_the_slope() -> None:
    config = KeyshiftConfig(
        vocab_size=1, hidden_size=4, num_attention_heads=1, position="alibi", attn_implementation="sdpa"
    )
    nothing = {"attention_mask": None, "position_ids": None, "document_ids": None}
    theirs = build_frame(config, torch.zeros(1, 6, 4, dtype=torch.float64), first_slot=0, **nothing)
    ours = frame_of(causal(6), slope=2.0**-8)
    torch.testing.assert_close(ours.mask, theirs.mask, rtol=0, atol=0)


def test_masks_hide_what_they_say() -> None:
    assert matched(5)[-1].tolist() == [False, True, True, True, False]
    assert strictly_earlier(3).tolist() == [[True, False, False], [True, False, False], [True, True, False]]


# Causality


def test_property_1() -> None:
    first, second = (virtual.random_pattern(7, torch.Generator().manual_seed(s)).numpy() for s in (1, 2))
    for i in range(1, 7):
        for j in range(i, 8):
            short = sum(second[j - 1, k - 1] * first[k - 1, i] for k in range(i + 1, j + 1))
            assert (second @ first)[j - 1, i] == pytest.approx(short, abs=1e-15)
    found = virtual.reach(range(2, 9))
    assert found.difference < 1e-15
    assert found.outside == 0
    assert found.entries == sum(sum(1 for i in range(1, n) for j in range(i, n + 1)) for n in range(2, 9))


def test_a_mask_that_multiplies_hides_nothing() -> None:
    assert mask.future_share(1) == 0
    expected = np.mean([(64 - n) / (n * math.exp(0.5) + 64 - n) for n in range(1, 65)])
    assert mask.future_share() == pytest.approx(expected, abs=0.03)


# Theorem 3


def loss_by_brute_force(embeddings: np.ndarray, given_weights: Weights, place: int) -> float:
    """One layer with identity projections on whole vectors, and a softmax over the vocabulary."""
    alpha_1, alpha_2, beta_1, beta_2 = given_weights
    tokens = [*range(len(embeddings)), place - 1]
    x = embeddings[tokens]
    before = np.vstack([np.zeros_like(x[:1]), x[:-1]])
    attention = softmax((alpha_1 * x + alpha_2 * before) @ x[-1])
    probabilities = softmax(embeddings @ (attention @ (beta_1 * x + beta_2 * before)))
    return -math.log(probabilities[tokens[place]])


@given(st.integers(2, 9), st.data(), weights)
@settings(max_examples=150, deadline=None)
def test_the_limit_is_the_loss_of_orthonormal_embeddings(
    tokens: int, data: st.DataObject, w: Weights
) -> None:
    place = data.draw(st.integers(1, tokens))
    brute = loss_by_brute_force(np.eye(tokens), w, place)
    assert learning.limit_loss(w, tokens, place) == pytest.approx(brute, abs=1e-12)
    assert learning.module_loss(w, tokens, place) == pytest.approx(brute, abs=1e-12)


@given(st.integers(4, 9), weights)
@settings(max_examples=50, deadline=None)
def test_the_formula_of_the_specification(tokens: int, w: Weights) -> None:
    """Away from the ends, as written there; with a2 for a1 it is what the paper prints."""
    alpha_1, alpha_2, beta_1, beta_2 = w
    total = math.exp(alpha_2) + 2 * math.exp(alpha_1) + tokens - 2
    a_1, a_2 = math.exp(alpha_1) / total, math.exp(alpha_2) / total
    right = math.exp(a_2 * beta_1 + beta_2 / total)
    for printed, middle in ((False, a_1), (True, a_2)):
        others = 2 * math.exp(beta_1 / total + beta_2 * middle) + math.exp(2 * a_1 * beta_1 + a_2 * beta_2)
        others += (tokens - 4) * math.exp((beta_1 + beta_2) / total)
        expected = -math.log(right / (right + others))
        assert learning.limit_loss(w, tokens, 2, printed=printed) == pytest.approx(expected, abs=1e-12)


@given(st.integers(2, 7), st.data(), weights)
@settings(max_examples=50, deadline=None)
def test_the_simulation_needs_inner_products_only(tokens: int, data: st.DataObject, w: Weights) -> None:
    place = data.draw(st.integers(1, tokens))
    embeddings = sequence(tokens, 30, seed=tokens) / 30**0.5
    found = simulation.finite_loss(embeddings @ embeddings.T, w, place)
    assert found == pytest.approx(loss_by_brute_force(embeddings.numpy(), w, place), abs=1e-12)


def test_wide_embeddings_take_the_formulas_side() -> None:
    found = simulation.simulate(widths=(1_000, 50_000), draws=12)
    for each in found:
        if each.width == 50_000:
            gap = simulation.gap(each)
            assert abs(gap.value) < 4 * gap.error
    (generic,) = (e for e in found if (e.weights, e.place, e.width) == ("free", 4, 50_000))
    printed = simulation.gap(generic, printed=True)
    assert printed.value < -100 * printed.error
    rate = simulation.fitted_rate(found)
    assert abs(rate.value + 0.5) < 2 * rate.error


@pytest.mark.parametrize(("tokens", "place"), [(5, 0), (5, 6), (1, 1)])
def test_a_place_outside_is_refused(tokens: int, place: int) -> None:
    with pytest.raises(UserError, match=f"place={place} must be between 1 and tokens={tokens}"):
        learning.limit_loss(Weights(0, 1, 1, 0), tokens, place)


def landscape_by_hand(alpha_1: float, beta_1: float, others: float) -> float:
    alpha_2, beta_2 = 1 - alpha_1, 1 - beta_1
    total = math.exp(alpha_2) + 2 * math.exp(alpha_1) + others
    a_1, a_2 = math.exp(alpha_1) / total, math.exp(alpha_2) / total
    right = math.exp(a_2 * beta_1 + beta_2 / total)
    wrong = 2 * math.exp(beta_1 / total + beta_2 * a_1) + math.exp(2 * a_1 * beta_1 + a_2 * beta_2) + others
    return -math.log(right / (right + wrong))


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(flow.OTHERS))
@settings(max_examples=100, deadline=None)
def test_the_flow_is_downhill(alpha_1: float, beta_1: float, others: float) -> None:
    point = torch.tensor([[alpha_1], [beta_1]], dtype=torch.float64).unbind()
    assert float(flow.landscape(*point, others)) == pytest.approx(
        landscape_by_hand(*map(float, point), others)
    )
    step = 1e-5
    for found, (up, right) in zip(flow.descent(*point, others), ((step, 0), (0, step)), strict=True):
        ahead = landscape_by_hand(float(point[0]) + up, float(point[1]) + right, others)
        behind = landscape_by_hand(float(point[0]) - up, float(point[1]) - right, others)
        assert float(found) == pytest.approx((behind - ahead) / (2 * step), abs=1e-8)


def test_the_survey_does_not_depend_on_its_grid() -> None:
    for others in flow.OTHERS:
        found = flow.survey(others)
        grows, falls = flow.away(*flow.square(900), others)
        assert found.away == pytest.approx(float((grows | falls).double().mean()), abs=1e-3)
        assert found.reach_corner == 1
        assert found.corner_flow[0] < 0 < found.corner_flow[1]
        assert found.beyond_loss < 1e-6
        assert found.quadrants[1] == min(found.quadrants)


@pytest.mark.parametrize("tokens", [4, 20])
def test_where_the_right_token_is_first(tokens: int) -> None:
    """The share of the square by brute force, whatever the vocabulary."""
    alpha_1, beta_1 = flow.square(25)
    hits = flow.right_first(alpha_1, beta_1)
    for a, b, hit in zip(alpha_1.flatten(), beta_1.flatten(), hits.flatten(), strict=True):
        w = Weights(float(a), 1 - float(a), float(b), 1 - float(b))
        right, others = learning.limit_logits(w, tokens, place=2)
        assert bool(hit) == all(right > logit for count, logit in others if count)


# The shift and position


@given(st.floats(-2, 2), st.sampled_from([2, 8, 32]))
@settings(max_examples=20, deadline=None)
def test_rotating_first_differs_by_one_step_of_the_previous_key(alpha_2: float, width: int) -> None:
    keys = sequence(9 * 2, width).view(1, 9, 2, width)
    mixing = torch.tensor([[0.3, alpha_2]] * 2, dtype=torch.float64)
    shift_first, rotate_first = order.both_orders(keys, mixing, theta=100.0)
    here, before = (rotation(torch.arange(9)[None] - back, width, 100.0, torch.float64) for back in (0, 1))
    previous = torch.cat((torch.zeros_like(keys[:, :1]), keys[:, :-1]), dim=1)
    expected = alpha_2 * (rotate(previous, here) - rotate(previous, before))
    torch.testing.assert_close(shift_first - rotate_first, expected, rtol=0, atol=1e-13)


def test_the_difference_of_the_orders_is_what_one_step_of_rotation_makes() -> None:
    assert order.relative_difference(0.0) == 0
    assert order.relative_difference(1.0) == pytest.approx(order.one_step(), rel=0.02)
    assert order.one_step(width=2) == pytest.approx(2 * math.sin(0.5))


@given(st.integers(2, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_shifting_scores_is_shifting_keys(window: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 10))
    begins = torch.tensor([[t * data.draw(st.booleans()) for t in range(length)]])
    starts = begins.cummax(dim=1).values
    queries, keys = sequence(2 * length * 3, 4).view(2, 1, length, 3, 4)
    mixing = sequence(3, window, seed=window)
    slots = torch.arange(length)
    seen = ((slots <= slots[:, None]) & (slots >= starts[:, :, None]))[:, None]
    sides = [
        side(queries, keys, mixing, starts).masked_fill(~seen, 0.0)
        for side in (score_shift.scores_by_keys, score_shift.scores_by_queries)
    ]
    torch.testing.assert_close(*sides, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", score_shift.CASES)
def test_layers_decode_what_they_compute_densely(case: str) -> None:
    assert 0 < score_shift.output_difference(case, window=3) < 1e-13


# GVA


def test_an_absorbed_map_gives_the_same_scores_and_outputs() -> None:
    for position in ("none", "decoupled_rope"):
        layer = decoded.drawn_layer(attention="gva", position=position)
        assert absorption.score_difference(layer) < 1e-14
        assert decoded.decode_difference(layer) < 1e-13


@torch.no_grad()
def test_effective_matrices_give_the_scores_of_the_rotated_keys() -> None:
    layer = decoded.drawn_layer(attention="gva", position="rope")
    matrices = absorption.effective_matrices(layer, distances=6)
    x = sequence(6, 48)[None]
    values = layer.source.expand(*layer.source.project(x))[1].repeat_interleave(2, dim=2)
    queries = layer.q_proj(x).unflatten(-1, (4, -1))
    weights_by_eager = eager_weights(layer, x)
    scores = torch.stack(
        [torch.einsum("hn,hnd,hd->h", queries[0, 5], matrices[5 - j], values[0, j]) for j in range(6)]
    )
    torch.testing.assert_close((scores / 4).softmax(0).T, weights_by_eager[0, :, 5], rtol=0, atol=1e-13)
    flat = matrices.reshape(6, -1)
    best, *_ = np.linalg.lstsq(np.ones((6, 1)), flat.numpy(), rcond=None)
    expected = np.linalg.norm(flat.numpy() - best) / np.linalg.norm(flat.numpy())
    assert absorption.unabsorbed_share(matrices) == pytest.approx(expected)


def eager_weights(layer: Attention, x: Tensor) -> Tensor:
    layer.config._attn_implementation = "eager"
    return layer(x, decoded.frame_between(layer, x, 0, x.shape[1]))[1]


def test_without_rotation_everything_is_absorbed() -> None:
    layer = decoded.drawn_layer(attention="gva", position="rope", rope_theta=1e9, head_dim=2)
    still = absorption.effective_matrices(layer, distances=1)
    assert absorption.unabsorbed_share(still) == 0


def test_flat_softmax_loses_half_the_variance_of_its_logits() -> None:
    """ln N - H = s²/2 to second order for logits of standard deviation s."""
    found = logits.logit_scale(0.5, 0.5)
    assert found.variance == pytest.approx(1 / 16, abs=4 * found.variance_error)
    assert (1 - found.entropy) * math.log(logits.KEYS) == pytest.approx(found.variance / 2, rel=0.03)
    assert logits.entropy_share(torch.full((1, 8), 1 / 8)).item() == pytest.approx(1)
    assert logits.entropy_share(torch.eye(8)[:1]).item() == 0


@torch.no_grad()
def test_slices_are_what_the_layers_multiply() -> None:
    model, input_ids = init_scale.started("matched", seed=3, query_norm=True)
    layer = model.model.layers[0].self_attn
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(input_ids))
    slices = init_scale.read_slices(model, input_ids)[0]
    torch.testing.assert_close(slices.queries, layer._raw_queries(x), rtol=0, atol=0)
    groups = layer.source.v_proj(x).unflatten(-1, (2, 64))
    keys = torch.stack([groups[:, :, head // 4] @ layer.source.key_map[head] for head in range(8)], dim=2)
    torch.testing.assert_close(slices.content_keys, keys, rtol=0, atol=1e-13)


def test_starts_are_as_derived() -> None:
    standard = init_scale.measure_start("standard", query_norm=False, seeds=3)
    matched_start = init_scale.measure_start("matched", query_norm=False, seeds=3)
    measured = init_scale.measure_start("measured", query_norm=True, seeds=2)
    assert standard.content == pytest.approx(0.02 * 64**0.5, rel=0.03)  # σ_M sqrt(d_h), whatever σ_V is
    assert standard.rotary == pytest.approx(1, abs=0.1)
    pooled = ((64 * standard.content**2 + 16 * standard.rotary**2) / 80) ** 0.5
    assert standard.pooled == pytest.approx(pooled, rel=0.02)
    assert matched_start.content == pytest.approx(1, abs=0.05)
    assert matched_start.predicted == pytest.approx((0.02**2 * 512) ** 2, rel=0.1)
    assert (measured.content, measured.rotary) == pytest.approx((1, 1), abs=1e-12)


# Uncertainty


def test_uncertainty_covers_the_truth() -> None:
    """Of many 95% intervals of small samples about 95% hold the true mean."""
    draws = np.random.default_rng(0).normal(2.0, 1.0, (1000, 5))
    intervals = [confidence(row.tolist()) for row in draws]
    covered = sum(abs(each.value - 2) < each.error for each in intervals)
    assert 0.93 < covered / 1000 < 0.97
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx((2, 1 / math.sqrt(3), 3))

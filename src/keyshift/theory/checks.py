"""The measurements in words: one row per statement of a paper, with the number that decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keyshift.theory import (
    absorption,
    decoded,
    init_scale,
    learning,
    logits,
    mask,
    order,
    score_shift,
    simulation,
    two_layers,
    virtual,
)
from keyshift.theory.results import (
    Check,
    CopyError,
    Landscape,
    LogitScale,
    ShiftedError,
    SimulatedLoss,
    SliceScales,
)
from keyshift.theory.uncertainty import Estimate


def theorem_1(found: Sequence[CopyError]) -> list[Check]:
    """Two layers approximate the induction-heads machine."""
    by_name = {name: [e for e in found if e.construction == name] for name in ("earlier", "causal", "undone")}
    slope = "slope of log error over p"
    last = by_name["undone"][-1].slope
    norm = two_layers.key_norm(last, "undone")
    return [
        Check(
            part="Theorem 1",
            statement="Two layers, D = 2d: the error falls as exp(-p)",
            measured=f"{slope}; layer 1 sees earlier tokens only",
            **_estimate(two_layers.fitted_slope(by_name["earlier"]), "95% confidence"),
            verdict="corrected",
            note="Not with an ordinary causal mask: the proof needs a first layer that cannot see its own "
            "token. What the slope lacks of -1 is the next order, exp(-2p).",
        ),
        Check(
            part="Theorem 1",
            statement="The same weights under the ordinary causal mask",
            measured=f"largest error at p = {last:g}",
            value=max(by_name["causal"][-1].errors),
            verdict="wrong",
            note="With W_Q = W_K = 0 and ALiBi, the nearest token that a layer sees is its own; no p helps.",
        ),
        Check(
            part="Theorem 1",
            statement="Only layer 2 under the ordinary causal mask",
            measured=f"largest error at p = {last:g}",
            value=two_layers.support_error(last),
            verdict="corrected",
            note="Definition 1 sums s = 2 … L - 1; such a layer also sees s = 1 and s = L.",
        ),
        Check(
            part="Theorem 1",
            statement="Ordinary mask, layer 2 subtracts the token itself",
            measured=slope,
            **_estimate(two_layers.fitted_slope(by_name["undone"]), "95% confidence"),
            verdict="corrected",
            note=f"Possible, but ‖W_K‖ of layer 2 grows as exp(p), {norm:.1e} at p = "
            f"{last:g}, where the theorem bounds it by O(1, 1/σ).",
        ),
    ]


def theorem_2(found: Sequence[ShiftedError]) -> list[Check]:
    """One layer with shifted keys is the machine."""
    scaled = max(each.scaled for each in found)
    return [
        Check(
            part="Theorem 2",
            statement="One layer, D = d, α = (0, 1): equal to IH on the same support",
            measured="largest error",
            value=max(each.matched for each in found),
            draws=len(found),
            verdict="holds",
        ),
        Check(
            part="Theorem 2",
            statement="The same under the ordinary causal mask",
            measured="largest error",
            value=max(each.causal for each in found),
            draws=len(found),
            verdict="corrected",
            note="Definition 1 sums s = 2 … L - 1. A causal layer also sees s = 1, with a zero key, "
            "and s = L.",
        ),
        Check(
            part="Theorem 2",
            statement="β1 = 1/σ, as the text has it, only scales the output",
            measured="largest error after multiplying by σ",
            value=max(each.rescaled for each in found),
            draws=len(found),
            verdict="corrected",
            note=f"Without that factor it is off by up to {scaled:.2g}: the temperature belongs into the "
            "scores, and W_O = I absorbs no factor.",
        ),
    ]


def causality() -> list[Check]:
    """Property 1, and the mask of eq. 6."""
    reach = virtual.reach()
    return [
        Check(
            part="Causality",
            statement="Property 1: (A2 A1)_{j,i+1} sums k from i + 1 to j",
            measured="largest difference from the whole product",
            value=reach.difference,
            draws=reach.entries,
            verdict="holds",
            note=f"The largest term outside is exactly {reach.outside:g}; for j = i the sum is empty.",
        ),
        Check(
            part="Causality",
            statement="Eq. 6 multiplies scores by the mask",
            measured="attention on future tokens, 64 tokens",
            value=mask.future_share(),
            verdict="wrong",
            note="A score times 0 is 0, and exp(0) is 1: the mask has to be added, as -∞. Its shape is "
            "N x N, not D x D.",
        ),
    ]


def theorem_3(found: Sequence[SimulatedLoss]) -> list[Check]:
    """The loss of one induction step in the limit of wide embeddings."""
    widest = max(each.width for each in found)
    at = {each.place: each for each in found if (each.weights, each.width) == ("free", widest)}
    generic = at[4]
    simulated = "simulated minus formula, nats"
    return [
        Check(
            part="Theorem 3",
            statement="The loss, right for every i (ends have terms of their own)",
            measured="largest difference from a real layer, one-hot embeddings",
            value=_largest_module_difference(),
            verdict="corrected",
            note="Of T + 1 positions T - 2 score 0 (the text says T - 3). The tokens of the middle term "
            "are i - 1 and T, those before the copies, not a successor of T + 1, which there is not.",
        ),
        Check(
            part="Theorem 3",
            statement="Middle term with a1, d = 200,000, i = 4 of T = 8",
            measured=simulated,
            **_estimate(simulation.gap(generic), "standard error"),
            verdict="corrected",
        ),
        Check(
            part="Theorem 3",
            statement="Middle term with a2, as printed",
            measured=simulated,
            **_estimate(simulation.gap(generic, printed=True), "standard error"),
            verdict="wrong",
        ),
        Check(
            part="Theorem 3",
            statement="Random embeddings approach it as d^(-1/2)",
            measured="slope of log deviation over log d",
            **_estimate(simulation.fitted_rate(found), "95% confidence"),
            verdict="holds",
        ),
        *(_end(place, generic.formula - at[place].formula, note) for place, note in ENDS.items()),
    ]


ENDS = {
    1: "Nothing stands before token 1: one token in the middle term, T - 3 others.",
    7: "Token T is the answer: it is read from the repeat too, β1 a2 + β2 a1; one token in the middle term, "
    "T - 3 others.",
    8: "The copies are neighbours and the answer is token T itself: another formula. Inside means "
    "2 <= i <= T - 2, so T >= 4, not 3.",
}
"""The places of T = 8 tokens that need a formula of their own, and why."""


def _end(place: int, difference: float, note: str) -> Check:
    return Check(
        part="Theorem 3",
        statement=f"One formula for every i: at i = {place} of 8",
        measured="formula for i inside minus the right one, nats",
        value=difference,
        verdict="corrected",
        note=note,
    )


def figure_2(found: Sequence[Landscape]) -> list[Check]:
    """Gradient flow on the unit square."""
    return [*_monotony(found), *_optimum(found), *_before_training(found[0], found[-1])]


def _monotony(found: Sequence[Landscape]) -> list[Check]:
    return [
        Check(
            part="Figure 2",
            statement=f"O(T) = {each.others:g}: α1 or β1 first moves away from (0, 1)",
            measured="share of the unit square",
            value=each.away,
            verdict="corrected" if each is found[-1] else "holds",
            note=f"Mean cosine of the flow with the straight way {each.mean_cosine:.2f}, mean length of "
            f"the gradient {each.mean_gradient:.2g}. With a2, as printed: {each.away_printed:.1%}."
            + (" The paper sees none here." if each is found[-1] else ""),
        )
        for each in found
    ]


def _optimum(found: Sequence[Landscape]) -> list[Check]:
    small = found[0]
    return [
        Check(
            part="Figure 2",
            statement="(0, 1) is the optimum inside the unit square",
            measured="least share of starts that end there",
            value=min(each.reach_corner for each in found),
            verdict="holds",
        ),
        Check(
            part="Figure 2",
            statement="(0, 1) is the optimum",
            measured="length of the gradient there, O(T) = 0",
            value=math.hypot(*small.corner_flow),
            verdict="corrected",
            note="It is the best corner of the square and no minimum: α and β are free, and the loss at "
            f"(-9, 20) is {small.beyond_loss:.0e}. There is no optimum; the flow leaves the square.",
        ),
    ]


def _before_training(small: Landscape, large: Landscape) -> list[Check]:
    """What a start is worth as it is."""
    quadrants = [f"{loss - small.even_loss:+.2f}" for loss in small.quadrants]
    return [
        Check(
            part="Figure 2",
            statement="Good initialisation alone is induction capability",
            measured="even guess minus loss at (0, 1), nats, O(T) = 100",
            value=large.even_loss - large.corner_loss,
            verdict="corrected",
            note=f"The right token has the largest logit on {large.right_first:.0%} of the square only, "
            f"whatever T is. At (0, 1) its probability is {math.exp(-large.corner_loss):.2%}, by an even "
            f"guess {math.exp(-large.even_loss):.2%}.",
        ),
        Check(
            part="Figure 2",
            statement="Table 4: α1 <= α2 and β1 <= β2 is induction-like",
            measured="mean loss there minus an even guess, nats, O(T) = 0",
            value=small.quadrants[3] - small.even_loss,
            verdict="wrong",
            note="Both shifted is attention to the token before. Induction is α1 <= α2, β1 > β2: "
            f"{quadrants[1]} (plain attention {quadrants[0]}, the fourth {quadrants[2]}).",
        ),
    ]


def shift_and_position() -> list[Check]:
    """The order of shift and RoPE, and the shift of scores."""
    windows = score_shift.WINDOWS
    outputs = [
        score_shift.output_difference(case, window) for case in score_shift.CASES for window in windows
    ]
    return [
        Check(
            part="Shift and RoPE",
            statement="Shift and rotation commute",
            measured="difference over keys, α = (0, 1), width 64",
            value=order.relative_difference(1.0),
            verdict="wrong",
            note=f"One step of rotation, {order.one_step():.3f} expected; 0 for α2 = 0 only.",
        ),
        Check(
            part="Shift and RoPE",
            statement="Score shift: Σ α_m (R_{i-m} q_i) κ_{j-m} is the score of the shifted key",
            measured="largest difference, padded and packed, windows 2-4",
            value=max(map(score_shift.score_difference, windows)),
            verdict="holds",
        ),
        Check(
            part="Shift and RoPE",
            statement="GQA, GVA, MLA layers decode so from raw caches",
            measured="largest difference from shifting keys and values",
            value=max(outputs),
            verdict="holds",
        ),
    ]


def absorbed_keys() -> list[Check]:
    """GVA's map moves into the query, unless RoPE is in between."""
    decoupled = decoded.drawn_layer(attention="gva", position="decoupled_rope")
    rotated = decoded.drawn_layer(attention="gva", position="rope", head_dim=64)
    matrices = absorption.effective_matrices(rotated, 512)
    return [
        Check(
            part="GVA",
            statement="q (v M)^T = (q M^T) v^T",
            measured="largest difference of scores",
            value=absorption.score_difference(decoupled),
            verdict="holds",
        ),
        Check(
            part="GVA",
            statement="Absorbed decoding is the dense layer",
            measured="largest difference of outputs",
            value=decoded.decode_difference(decoupled),
            verdict="holds",
        ),
        Check(
            part="GVA",
            statement="RoPE on the rebuilt key cannot be absorbed",
            measured="share of R_{j-t} M^T outside its mean, 512 distances",
            value=absorption.unabsorbed_share(matrices),
            verdict="holds",
        ),
    ]


def logit_scales(found: Sequence[LogitScale]) -> list[Check]:
    """Appendix A of the GVA paper: eq. 14 and both regimes."""
    pairs = {(each.query_scale, each.key_scale): each for each in found}
    return [
        Check(
            part="GVA, scale",
            statement="Var(q k / sqrt(d)) = σ_Q² σ_K²",
            measured="measured over predicted, 16 pairs of scales",
            **_estimate(logits.variance_ratio(found), "standard error"),
            verdict="holds",
        ),
        *(
            Check(
                part="GVA, scale",
                statement=f"Equal scales, σ_Q = σ_K = {scale:g}: {regime}",
                measured="entropy of 256 weights over ln 256",
                value=pairs[scale, scale].entropy,
                error=pairs[scale, scale].entropy_error,
                error_kind="standard error",
                draws=logits.QUERIES,
                verdict="holds",
            )
            for scale, regime in ((0.25, "flat"), (8.0, "one position"))
        ),
    ]


def starts(found: Sequence[SliceScales]) -> list[Check]:
    """GVA models before training."""
    standard, matched, measured = (
        next(s for s in found if s.start == n and not s.query_norm) for n in init_scale.STARTS
    )
    normed = next(s for s in found if s.start == "matched" and s.query_norm)
    ratio = "key RMS over query RMS, "
    return [
        _start("Standard start: content keys are too small", f"{ratio}content", standard, "content", "holds"),
        _start("Standard start: rotary keys are not", f"{ratio}rotary", standard, "rotary", "holds"),
        _start(
            "Pooled over both slices the mismatch is hidden",
            f"{ratio}whole head",
            standard,
            "pooled",
            "holds",
        ),
        _start(
            "Matched start: equal RMS",
            f"{ratio}content",
            matched,
            "content",
            "holds",
            f"On average: single draws differ by {matched.content_spread:.1%} (standard deviation); "
            f"match_keys_ makes it {measured.content:.3f} and {measured.rotary:.3f} in each.",
        ),
        _start(
            "Flat attention comes from the mismatch",
            "entropy over ln 64, matched, no query norm",
            matched,
            "entropy",
            "corrected",
            f"Matched keys are nearly as flat as standard ones ({standard.entropy:.4f}) at hidden size 512: "
            "σ_Q is 0.02 sqrt(512) = 0.45, and the logits' variance its fourth power. Query norm ends it "
            f"({normed.entropy:.3f}).",
        ),
    ]


def _start(statement: str, measured: str, of: SliceScales, field: str, verdict: Any, note: str = "") -> Check:
    return Check(
        part="GVA, start",
        statement=statement,
        measured=measured,
        value=getattr(of, field),
        error=getattr(of, f"{field}_error"),
        error_kind="standard error",
        draws=of.seeds,
        verdict=verdict,
        note=note,
    )


def _estimate(found: Estimate, kind: Any) -> dict[str, Any]:
    return {"value": found.value, "error": found.error, "error_kind": kind, "draws": found.draws}


def _largest_module_difference() -> float:
    """Between the limit's formula and a layer with one-hot embeddings, for T = 2 … 8 and every i."""
    return max(
        abs(learning.limit_loss(weights, tokens, place) - learning.module_loss(weights, tokens, place))
        for weights in simulation.SAMPLES.values()
        for tokens in range(2, 9)
        for place in range(1, tokens + 1)
    )

"""What ``keyshift theory`` finds: the schema of ``theory.json``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from keyshift.results import Record

SCHEMA_VERSION: Literal[1] = 1

Construction = Literal["earlier", "causal", "undone"]
Verdict = Literal["holds", "corrected", "wrong"]


class Check(Record):
    """One statement of a paper and the number that decides it."""

    part: str = Field(description="the theorem or section that it belongs to")
    statement: str = Field(description="what is claimed, as it should be read")
    measured: str = Field(description="what the number is")
    value: float
    error: float | None = Field(None, description="of the value; None for what was computed, not sampled")
    error_kind: Literal["standard error", "95% confidence"] | None = None
    draws: int | None = Field(None, description="independent draws behind value and error")
    verdict: Verdict = Field(
        description="whether the paper's statement holds, needs a correction, or is wrong"
    )
    note: str = Field("", description="what the paper says, where that differs")


class CopyError(Record):
    """Theorem 1: the two-layer construction at one ALiBi slope of its first layer."""

    construction: Construction = Field(
        description="layer 1 sees earlier tokens; its own too; its own too, and layer 2 takes it out"
    )
    slope: float = Field(description="p, of layer 1")
    errors: list[float] = Field(description="‖IH - TF‖∞, one per sequence")


class ShiftedError(Record):
    """Theorem 2: distances from Definition 1 on one sequence, in the largest coordinate."""

    length: int
    matched: float = Field(description="under the support of Definition 1")
    causal: float = Field(description="under the ordinary causal mask")
    scaled: float = Field(description="with the text's β1 = 1/σ")
    rescaled: float = Field(description="the same times σ")


class SimulatedLoss(Record):
    """Theorem 3: losses with random embeddings, one per draw, and the formula's."""

    weights: str = Field(description="name of the sample of (α1, α2, β1, β2)")
    place: int = Field(description="i, from 1")
    width: int = Field(description="d")
    losses: list[float] = Field(description="nats")
    formula: float = Field(description="with a1 in the middle term, and the ends' own terms")
    printed: float = Field(description="with a2 in the middle term")


class Landscape(Record):
    """Theorem 3: the unit square of (α1, β1) for one O(T), α2 = 1 - α1 and β2 = 1 - β1."""

    others: float = Field(description="O(T)")
    alpha_away: float = Field(description="share of starts whose α1 first grows")
    beta_away: float = Field(description="share of starts whose β1 first falls")
    away: float = Field(description="share of starts with either")
    away_printed: float = Field(description="the same with a2 in the middle term, as printed")
    mean_cosine: float = Field(description="between the flow and the straight way to (0, 1)")
    least_cosine: float
    mean_gradient: float = Field(description="length of the gradient")
    reach_corner: float = Field(description="share of starts that end at (0, 1) when held inside the square")
    corner_loss: float = Field(description="at (0, 1), nats")
    largest_loss: float = Field(description="in the square, nats")
    even_loss: float = Field(description="of an even guess among 4 + O(T) tokens, nats")
    corner_flow: tuple[float, float] = Field(description="the flow at (0, 1); 0 if it were a minimum")
    quadrants: list[float] = Field(
        description="mean loss where (α1 > α2, β1 > β2), (α1 <= α2, β1 > β2), (α1 > α2, β1 <= β2), neither"
    )
    right_first: float = Field(description="share of the square where the right token has the largest logit")
    beyond_loss: float = Field(description="at (-9, 20), outside of the square, nats")


class LogitScale(Record):
    """Random queries and keys: logits' variance, and how flat the softmax over 256 keys is."""

    query_scale: float = Field(description="σ_Q")
    key_scale: float = Field(description="σ_K")
    variance: float
    variance_error: float
    entropy: float = Field(description="over ln 256: 1 for even attention")
    entropy_error: float
    top: float = Field(description="the largest weight")
    top_error: float


class SliceScales(Record):
    """GVA models before training: mean and standard error over seeds. Ratios are key RMS over query RMS."""

    start: str = Field(description="standard, matched, or matched and then measured (match_keys_)")
    query_norm: bool
    seeds: int
    content: float
    content_error: float
    content_spread: float = Field(description="standard deviation of `content` between seeds")
    rotary: float
    rotary_error: float
    pooled: float = Field(description="of whole heads")
    pooled_error: float
    variance: float = Field(description="of the last token's logits")
    variance_error: float
    predicted: float = Field(description="that variance by σ_Q² σ_K², slice by slice")
    predicted_error: float
    entropy: float = Field(description="of the last token's attention, over ln T")
    entropy_error: float


class TheoryReport(Record):
    """Everything that one run of ``keyshift theory`` checked."""

    schema_version: Literal[1] = SCHEMA_VERSION
    command: str
    created: str = Field(description="ISO 8601, UTC")
    environment: dict[str, str]
    seconds: float
    checks: list[Check]
    two_layers: list[CopyError]
    one_layer: list[ShiftedError]
    simulations: list[SimulatedLoss]
    landscapes: list[Landscape]
    logit_scales: list[LogitScale]
    starts: list[SliceScales]

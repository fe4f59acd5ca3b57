"""What an analysis of circuits finds: the schema of ``circuits.json``.

Heads are named ``layer.head``, both counted from 0. Losses are in nats. A field is None, or a list empty,
where the measurement does not exist for the model or was not asked for; ``notes`` say why.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from keyshift.results import Record

SCHEMA_VERSION: Literal[1] = 1


class Positivity(Record):
    """Σλ / Σ|λ| of a matrix's eigenvalues: 1 all positive, -1 all negative."""

    value: float = Field(description="0 for a zero matrix, which has no sign")
    condition: float = Field(description="of the eigenvectors: rounding is amplified by up to this factor")
    zero: bool = Field(False, description="the matrix is zero, so the value says nothing")


class CopyResult(Record):
    """Predictions inside one copy of a repeated sequence, over all sequences."""

    copy_index: int = Field(description="1 for the first copy")
    loss: float = Field(description="mean loss of the tokens predicted inside this copy")
    top1: float = Field(description="share of them that are the model's first guess")


class RepeatsResult(Record):
    """Repeated random tokens: [BOS] + the same random tokens, again and again."""

    period: int = Field(description="n, the random tokens of one copy")
    repeats: int = Field(description="copies per sequence")
    sequences: int
    seed: int
    with_replacement: bool = Field(description="whether a token may occur twice in one copy")
    uniform_loss: float = Field(description="ln V: the loss of an even guess")
    copies: list[CopyResult]
    loss_by_position: list[float] = Field(description="[t]: mean loss of predicting token t + 1; BOS is 0")
    top1_by_position: list[float]


class Levels(Record):
    """What a head that spreads its weight evenly over the allowed tokens would score."""

    previous_token: float
    induction: float
    duplicate_token: float
    first_token: float


class HeadResult(Record):
    """One head: behaviour on the repeated sequences, then its weights, then what breaks without it."""

    layer: int
    head: int
    key_value_head: int = Field(description="which key/value head it reads through")
    previous_token: float = Field(description="attention to the token before")
    induction: float = Field(description="attention to the token after an earlier copy of the present one")
    duplicate_token: float = Field(description="attention to an earlier copy of the present token")
    first_token: float = Field(description="attention to the first token")
    induction_flow: float | None = Field(
        None, description="induction score of the value flow: where the head's information came from (shift)"
    )
    ov: Positivity | None = Field(None, description="W_U W_OV W_E: does the head copy what it reads?")
    copies: float | None = Field(None, description="share of tokens whose top output is the token itself")
    matching: Positivity | None = Field(
        None, description="same matching through ``matching_with``: the K-composition term"
    )
    matching_with: str | None = Field(None, description="an earlier head, or 'shift' for α2 W_QK")
    direct: Positivity | None = Field(None, description="W_E^T W_QK W_E: present against source token")
    key_shift: list[float] | None = Field(None, description="α1, α2, … of the head")
    value_shift: list[float] | None = Field(None, description="β1, β2, … of the head")
    shift_set: int | None = Field(
        None, description="which of its layer's sets of shift weights the head uses; heads may share one"
    )
    induction_loss_increase: float | None = Field(
        None, description="loss on the last copy without this head, minus the loss with it"
    )

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


class CompositionResult(Record):
    """How strongly one head reads what each earlier head writes, from weights alone."""

    into: str = Field(description="the reading head")
    kind: Literal["K", "Q", "V"]
    scores: dict[str, float] = Field(description="earlier head -> ‖product‖ / (‖factor‖ ‖factor‖)")
    baseline: float = Field(description="mean score of random matrices of the same shapes")


class Part(Record):
    """One part of an attention score, from one piece of the residual stream."""

    name: str = Field(description="embedding, position, a head, 'bias', 'mlp 0', …")
    shift: int = Field(0, description="which token's key it comes from: m places before the source (shift)")
    target: float = Field(description="share of the score at the induction target")
    average: float = Field(description="mean share over all allowed sources")
    lift: float = Field(description="target - average")

    @property
    def writer(self) -> str | None:
        """The earlier head that wrote this part, if one did."""
        first = self.name.split()[0]
        return first if first.replace(".", "", 1).isdigit() else None


class LiftResult(Record):
    """Where a head's key (or query) comes from: the parts of its score at the induction target."""

    head: str
    side: Literal["key", "query"]
    parts: list[Part] = Field(description="largest lift first")
    sequences: int = Field(description="repeated sequences that it was measured on")
    score: float = Field(description="the model's own score at the target, mean")
    residual: float = Field(description="largest |sum of parts - the model's own score| over the scores")


class AblationResult(Record):
    """The repeated sequences again, without some heads."""

    heads: list[str] = Field(description="empty: nothing ablated")
    role: str = Field(description="why these: 'previous-token head', 'control: …', …")
    loss: list[float] = Field(description="per copy")
    top1: list[float] = Field(description="per copy")
    induction: dict[str, float] = Field(description="induction score of each induction head, then")


class QuadrantResult(Record):
    """One cell of the table of (α, β) (KV shifting paper, table 4)."""

    key_previous: bool = Field(description="α1 <= α2: the key is mostly the previous token's")
    value_previous: bool = Field(description="β1 <= β2")
    heads: list[str] = Field(description="heads with weights of their own, named by their first query head")
    induction: float | None = Field(None, description="mean induction score of their query heads")
    loss_increase: float | None = Field(None, description="mean ablation effect of their query heads")


class CorrelationResult(Record):
    """Spearman's rank correlation, over sets of shift weights, with what is measured."""

    of: str = Field(description="'key', 'value' or 'both': the share of weight that fits induction")
    against: str = Field(description="'induction' or 'loss_increase'")
    rho: float | None = Field(description="None where one side is constant")
    p_value: float | None
    sets: int = Field(description="sets of shift weights; heads that share one count once")


class ParkingResult(Record):
    """Where an induction head looks when there is nothing to find, on a short repeated string."""

    head: str
    period: int
    first_copy_first_token: float = Field(description="weight on BOS over positions 2 … n of the first copy")
    second_copy_target: float = Field(description="weight on the token after the earlier copy")


class PromptRow(Record):
    """One position of the prompt at which the next token has been seen after the present one before."""

    position: int
    token: str
    next_token: str = Field(description="the token that follows in the prompt")
    probability: float = Field(description="the model's probability for it")
    head: str
    reads: str = Field(description="the token at the head's largest weight")
    reads_position: int
    weight: float
    logit: float = Field(description="what the head adds to the logit, relative to the mean over all tokens")


class PromptResult(Record):
    """Repeats inside a prompt, such as a made-up name in a sentence."""

    text: str
    tokens: list[str]
    rows: list[PromptRow]


class CopyingExample(Record):
    """What a head's output circuit raises when the head reads a token."""

    head: str
    token: str
    raises: list[str]


class ModelFacts(Record):
    """What was analysed."""

    name: str
    kind: str = Field(description="model type, and for keyshift models the three axes")
    layers: int
    heads: int = Field(description="query heads per layer")
    key_value_heads: int
    hidden_size: int
    head_width: int = Field(description="of keys and queries")
    vocabulary: int
    context: int | None = Field(description="most tokens, where the model says so")
    position: str = Field(description="how position enters: 'learned', 'rotary', 'other'")
    dtype: str
    parameters: int


class ModelResult(Record):
    """Everything about one model."""

    facts: ModelFacts
    convention: Literal["paper", "arena", "transformer_lens"] = Field(description="of the head scores")
    norms_folded: bool = Field(description="whether gains of norms are part of the weight measurements")
    offset: int | None = Field(None, description="query minus key position of weight-only QK (RoPE)")
    repeats: RepeatsResult
    levels: Levels
    heads: list[HeadResult] = Field(description="layer by layer")
    previous_token_head: str | None = Field(None, description="the strongest, if it stands out")
    induction_heads: list[str] = Field(
        [], description="those that stand out, strongest first, or those that were asked for"
    )
    compositions: list[CompositionResult] = Field([])
    lifts: list[LiftResult] = Field([])
    ablation_method: str = ""
    ablations: list[AblationResult] = Field([], description="the first has nothing ablated")
    quadrants: list[QuadrantResult] = Field([])
    correlations: list[CorrelationResult] = Field([])
    parking: list[ParkingResult] = Field([])
    copying: list[CopyingExample] = Field([])
    prompt: PromptResult | None = None
    findings: list[str] = Field([], description="in plain language, each backed by a number above")
    notes: list[str] = Field([], description="what could not be measured, and why")
    seconds: float = Field(description="wall time of the analysis")


class CircuitsReport(Record):
    """The whole of ``circuits.json``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    command: str
    created: str = Field(description="ISO 8601 time, UTC")
    environment: dict[str, str]
    models: list[ModelResult]

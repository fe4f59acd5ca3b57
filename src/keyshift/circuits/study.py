"""One analysis under way: the model, what it is analysed with, and what its steps share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from keyshift.circuits.ablation import Head, Means, Method, check_method, mean_results
from keyshift.circuits.eigen import Vocabulary
from keyshift.circuits.findings import stands_out
from keyshift.circuits.marks import Convention, Kind, check_convention
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.prompt import check_text
from keyshift.circuits.repeats import Repeats, prediction_losses, sample_repeats
from keyshift.circuits.scores import HeadScores, head_scores, strongest
from keyshift.circuits.weights import LayerWeights, layer_weights
from keyshift.errors import UserError, first_line

MOST_INDUCTION_HEADS = 4

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and of how much."""


@dataclass(frozen=True)
class Settings:
    """What to analyse a model with.

    Attributes:
        period, repeats, sequences, seed, with_replacement, bos: as in `sample_repeats`.
        convention: of the head scores.
        method: of the ablations.
        fold_norms: multiply the gains of norms into the matrices of the weight measurements.
        text: a prompt with a repeat in it; None for a made-up name, where there is a tokenizer.
        heads: analyse these as induction heads, instead of those that stand out.
    """

    period: int = 50
    repeats: int = 2
    sequences: int = 100
    seed: int = 0
    with_replacement: bool = False
    bos: int | None = None
    convention: Convention = "paper"
    method: Method = "mean"
    fold_norms: bool = True
    text: str | None = None
    heads: tuple[str, ...] = ()

    def check(self, model: CircuitModel) -> None:
        """Refuse what later steps would, before the work of the first ones.

        Raises:
            UserError: settings that do not fit each other or the model.
        """
        check_convention(self.convention, self.period)
        check_method(self.method)
        if self.method == "resample" and self.sequences < 2:
            raise UserError(f"sequences={self.sequences}: method='resample' needs at least 2")
        for name in self.heads:
            model.head(name)
        if self.text is not None:
            check_text(model, self.text)

    def sample(self, model: CircuitModel, *, period: int, sequences: int) -> Repeats:
        """Repeated tokens of these settings, with another period or number."""
        return sample_repeats(
            model,
            period=min(period, self.period),
            repeats=self.repeats,
            sequences=sequences,
            seed=self.seed,
            with_replacement=self.with_replacement,
            bos=self.bos,
        )


@dataclass
class Study:
    """What the steps of an analysis share.

    Attributes:
        loss_ST, right_ST: of every prediction on ``sequences``.
        scores: of all heads on them.
        means: mean result vectors on them, where the ablations need them.
        previous: the previous-token head, if one stands out.
        induction: the induction heads that stand out, or those that were asked for.
        notes: what could not be measured, and why.
    """

    model: CircuitModel
    settings: Settings
    progress: Progress
    sequences: Repeats
    loss_ST: Tensor
    right_ST: Tensor
    scores: HeadScores
    vocabulary: Vocabulary
    means: Means | None
    previous: Head | None = None
    induction: list[Head] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _weights: dict[int, LayerWeights | None] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Keep a remark, once."""
        if text not in self.notes:
            self.notes.append(text)

    def weights(self, layer: int) -> LayerWeights | None:
        """The matrices of a layer, made once; None, with a note, where there are none."""
        if layer not in self._weights:
            self._weights[layer] = self._read_weights(layer)
        return self._weights[layer]

    def _read_weights(self, layer: int) -> LayerWeights | None:
        settings = self.settings
        try:
            weights = layer_weights(
                self.model, layer, offset=settings.period - 1, fold_norms=settings.fold_norms
            )
        except (UserError, RuntimeError) as error:  # the module's own code, on other input than it is used to
            self.note(f"layer {layer}: no weight measurements: {first_line(error)}")
            return None
        if weights.unscaled:
            self.note(
                "a norm of queries, keys or a latent is inside the attention: its gain is part of the "
                "matrices, its scale is not"
            )
        return weights

    @property
    def known_weights(self) -> list[LayerWeights]:
        """The matrices that have been asked for so far."""
        return [weights for weights in self._weights.values() if weights is not None]


def begin(model: CircuitModel, settings: Settings, progress: Progress) -> Study:
    """Run the model on repeated tokens, score its heads, and tell which stand out.

    Raises:
        UserError: settings that do not fit the model.
    """
    settings.check(model)
    sequences = settings.sample(model, period=settings.period, sequences=settings.sequences)
    progress("repeated tokens", 0, 3)
    loss, right = prediction_losses(model, sequences.ids_ST)
    progress("repeated tokens", 1, 3)
    scores = head_scores(model, sequences, convention=settings.convention)
    progress("repeated tokens", 2, 3)
    averaged = settings.method in ("mean", "position_mean")
    study = Study(
        model=model,
        settings=settings,
        progress=progress,
        sequences=sequences,
        loss_ST=loss,
        right_ST=right,
        scores=scores,
        vocabulary=Vocabulary(model, settings.fold_norms),
        means=mean_results(model, sequences.ids_ST) if averaged else None,
    )
    named = [model.head(name) for name in dict.fromkeys(settings.heads)]
    study.induction = named or standing_out(scores, "induction")[:MOST_INDUCTION_HEADS]
    if settings.period == 2:
        study.note("with period 2 the token after the earlier copy is the token before: both scores are one")
    layers = getattr(model.config, "num_hidden_layers", len(model.layers))
    if layers != len(model.layers):
        study.note(
            f"{len(model.layers)} of {layers} layers have attention that can be watched; heads are numbered "
            "by these"
        )
    last = max((layer for layer, _ in study.induction), default=len(model.layers) - 1)
    earlier = (head for head in standing_out(scores, "previous_token") if head[0] < last)
    study.previous = next(earlier, None)
    return study


def standing_out(scores: HeadScores, kind: Kind) -> list[Head]:
    """The heads whose score stands out from even spreading, the highest first."""
    found = []
    for layer, head, score in strongest(scores, kind):
        if stands_out(score, scores.levels[layer][kind]):
            found.append((layer, head))
    return found

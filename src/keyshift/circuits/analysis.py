"""The whole analysis of one model, and what it found in plain words."""

from __future__ import annotations

import math
import time
from typing import Any

from keyshift.circuits import evidence
from keyshift.circuits.ablation import POPULATION
from keyshift.circuits.findings import describe
from keyshift.circuits.head_table import add_effects, head_table
from keyshift.circuits.marks import KINDS
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.results import CopyResult, Levels, ModelFacts, ModelResult, RepeatsResult
from keyshift.circuits.scores import HeadScores
from keyshift.circuits.shifted import correlations, quadrants
from keyshift.circuits.study import Progress, Settings, Study, begin
from keyshift.configuration import KeyshiftConfig


def analyse(
    model: CircuitModel, settings: Settings | None = None, progress: Progress = lambda what, done, total: None
) -> ModelResult:
    """Everything that `ModelResult` holds, for one model. Its weights are left as they are, bit by bit.

    Raises:
        UserError: settings that do not fit the model.
    """
    began = time.monotonic()
    study = begin(model, settings or Settings(), progress)
    heads = head_table(study)
    add_effects(study, heads)
    lifts = evidence.lifts(study)
    result = ModelResult(
        facts=_facts(study),
        convention=study.settings.convention,
        norms_folded=study.settings.fold_norms,
        offset=next((each.offset for each in study.known_weights if each.offset is not None), None),
        repeats=_repeats(study),
        levels=_levels(study.scores),
        heads=heads,
        previous_token_head=None if study.previous is None else evidence.name(study.previous),
        induction_heads=[evidence.name(head) for head in study.induction],
        compositions=evidence.compositions(study),
        lifts=lifts,
        ablation_method=f"result vectors replaced with {POPULATION[study.settings.method]}",
        ablations=evidence.ablations(study, lifts),
        quadrants=quadrants(heads),
        correlations=correlations(heads),
        parking=evidence.parking(study),
        copying=evidence.copying(study),
        prompt=evidence.prompt(study),
        seconds=time.monotonic() - began,
    )
    result.notes = study.notes
    result.findings = describe(result)
    return result


def _repeats(study: Study) -> RepeatsResult:
    settings, sequences = study.settings, study.sequences
    copies = zip(sequences.by_copy(study.loss_ST), sequences.by_copy(study.right_ST.float()), strict=True)
    return RepeatsResult(
        period=settings.period,
        repeats=settings.repeats,
        sequences=settings.sequences,
        seed=settings.seed,
        with_replacement=settings.with_replacement,
        uniform_loss=math.log(study.model.vocabulary),
        copies=[
            CopyResult(copy_index=number, loss=loss, top1=top1)
            for number, (loss, top1) in enumerate(copies, start=1)
        ],
        loss_by_position=study.loss_ST.double().mean(0).tolist(),
        top1_by_position=study.right_ST.double().mean(0).tolist(),
    )


def _levels(scores: HeadScores) -> Levels:
    """Even spreading, averaged over layers (they differ where some have a sliding window)."""
    means: dict[str, Any] = {
        kind: sum(level[kind] for level in scores.levels) / len(scores.levels) for kind in KINDS
    }
    return Levels(**means)


def _facts(study: Study) -> ModelFacts:
    model, first = study.model, study.model.layers[0]
    return ModelFacts(
        name=model.name,
        kind=_kind(model),
        layers=len(model.layers),
        heads=first.heads,
        key_value_heads=first.key_heads,
        hidden_size=model.hidden_size,
        head_width=first.shape[0],
        vocabulary=model.vocabulary,
        context=model.context,
        position=_position(study),
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=sum(parameter.numel() for parameter in model.module.parameters()),
    )


def _kind(model: CircuitModel) -> str:
    if isinstance(model.config, KeyshiftConfig):
        shift = "no shift" if model.config.shift == "none" else f"{model.config.shift} shift"
        return f"keyshift, {model.config.attention}, {shift}"
    return str(getattr(model.config, "model_type", None) or type(model.module).__name__)


def _position(study: Study) -> str:
    if isinstance(study.model.config, KeyshiftConfig):
        return study.model.config.position
    if study.model.position_table is not None:
        return "learned"
    return "rotary" if any(each.offset is not None for each in study.known_weights) else "other"

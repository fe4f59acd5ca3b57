"""How a checkpoint came about, as far as a run's folder says: recipe, steps, measured on held-out data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from keyshift.folder import RECIPE_FILE
from keyshift.recipe import Recipe, Variant
from keyshift.results import RunResult
from keyshift.runs import slug

STATE = "trainer_state.json"
Kind = TypeVar("Kind", bound=BaseModel)


@dataclass(frozen=True)
class Trained:
    """What is known; None and empty where it is not.

    Attributes:
        step: optimiser steps that the weights have taken.
        heldout: loss (nats per token), bits_per_byte, accuracy, measured at that very step.
        recipe, variant, seed: of the run, where the checkpoint lies in its folder.
        result: of the run, if it ended at that step.
    """

    step: int
    heldout: dict[str, float] = field(default_factory=dict)
    recipe: Recipe | None = None
    variant: Variant | None = None
    seed: int | None = None
    result: RunResult | None = None


def trained(checkpoint: Path) -> Trained | None:
    """What a checkpoint and the folders above it say; None for one without a trainer's state.

    ``OUT/recipe.json`` and ``OUT/runs/VARIANT/seed-N/result.json`` are read where ``checkpoint`` is
    ``OUT/runs/VARIANT/seed-N/checkpoint-M``; what is not there, or not readable, is not known.
    """
    state = _json(checkpoint / STATE)
    step = state.get("global_step")
    if type(step) is not int:
        return None
    heldout = _heldout(state.get("log_history"), step)
    run = checkpoint.resolve().parent
    result = _record(run / "result.json", RunResult)
    if result is not None and (result.status != "finished" or result.steps != step):
        result = None
    number = run.name.removeprefix("seed-")
    if len(run.parents) < 3 or run.parents[1].name != "runs" or number == run.name or not number.isdigit():
        return Trained(step, heldout)
    recipe = _record(run.parents[2] / RECIPE_FILE, Recipe)
    variants = [] if recipe is None else list(recipe.grid().values())
    variant = next((each for each in variants if slug(each.name) == run.parent.name), None)
    return Trained(step, heldout, recipe, variant, int(number), result)


def _heldout(history: Any, step: int) -> dict[str, float]:
    for entry in history if isinstance(history, list) else []:
        if entry.get("step") == step and "eval_loss" in entry:
            names = ("loss", "bits_per_byte", "accuracy")
            return {name: entry[f"eval_{name}"] for name in names if f"eval_{name}" in entry}
    return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _record(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return kind.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        return None

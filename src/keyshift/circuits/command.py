"""What ``keyshift circuits`` does: load, analyse, write the report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from keyshift.circuits.analysis import analyse
from keyshift.circuits.capture import AttentionCall
from keyshift.circuits.loading import load_model, shipped_models
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.report import Patterns, write_circuits
from keyshift.circuits.results import CircuitsReport, ModelResult
from keyshift.circuits.scores import value_weights
from keyshift.circuits.study import Progress, Settings
from keyshift.circuits.toy import SEQUENCE, toy_circuit
from keyshift.errors import RunError, UserError, first_line
from keyshift.provenance import command_line, environment, moment

VIEWED_PERIOD = 20
"""Random tokens per copy in the pattern viewer, where there is no prompt to show."""


def analyse_models(
    name: str | None, settings: Settings, directory: Path, progress: Progress
) -> CircuitsReport:
    """Analyse a model, or without a name those that come with keyshift, and write the report.

    Raises:
        UserError: a model that cannot be loaded or analysed, settings that do not fit, a folder that cannot
            be written.
        RunError: a model whose own code fails in the analysis.
    """
    _check_writable(directory)
    results, shown = [], []
    for each in [name] if name is not None else list(shipped_models()):
        model = load_model(each)
        with _in_one_line(model):
            results.append(
                analyse(
                    model, settings, lambda what, *done, label=model.name: progress(f"{label}: {what}", *done)
                )
            )
            shown.append(example_patterns(model, results[-1], settings))
    report = CircuitsReport(
        command=command_line(),
        created=moment(),
        environment=environment(),
        models=results,
    )
    try:
        write_circuits(report, shown, directory)
    except OSError as error:
        raise UserError(
            f"out={directory} cannot be written ({error.strerror}); pass another --out"
        ) from error
    return report


@contextmanager
def _in_one_line(model: CircuitModel) -> Iterator[None]:
    """What a model's own code makes of the analysis, where it was not foreseen, as one line."""
    try:
        yield
    except (UserError, RunError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        kind = type(model.module).__name__
        what = f"{type(error).__name__}: {first_line(error)}"
        raise RunError(f"{model.name} ({kind}) cannot be analysed: {what}") from error


def _check_writable(directory: Path) -> None:
    """Refuse a folder that could not be made or written, before the work and without making it."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(
            f"out={directory} cannot be written ({there} is no writable folder); pass another --out"
        )


@torch.no_grad()
def example_patterns(model: CircuitModel, result: ModelResult, settings: Settings) -> Patterns:
    """What the pattern viewer shows: the prompt where there is one, else a repeated sequence."""
    if result.prompt is not None:
        ids, note = model.encode(result.prompt.text), "The tokens are those of the prompt."
    else:
        sample = settings.sample(model, period=VIEWED_PERIOD, sequences=1)
        ids, note = sample.ids_ST, f"{sample.period} random tokens, {sample.repeats} times."
    calls: list[AttentionCall] = []
    model.watch(ids, observer=calls.append)
    most = max(layer.heads for layer in model.layers)
    weights = torch.zeros(len(calls), most, ids.shape[1], ids.shape[1])
    norms = torch.zeros(len(calls), most, ids.shape[1])
    for index, call in enumerate(calls):
        heads = call.queries_BHTD.shape[1]
        weights[index, :heads] = call.pattern()[0]
        values = call.values_BGTV[0].float().norm(dim=-1)
        norms[index, :heads] = values.repeat_interleave(heads // len(values), dim=0)
    betas = [value_weights(call) for call in calls]
    return Patterns(
        tokens=[model.token(int(token)) for token in ids[0]],
        weights_LHTT=weights.numpy(),
        value_norms_LHT=norms.numpy(),
        value_shift=None
        if all(each is None for each in betas)
        else [[[]] * most if each is None else each.tolist() for each in betas],
        note=note,
    )


def toy_values() -> dict[str, Any]:
    """The hand-built circuit as plain JSON values."""
    toy = toy_circuit()
    return {
        "sequence": SEQUENCE,
        "stream": toy.stream_TD.tolist(),
        "scores": toy.scores_T.tolist(),
        "weights": toy.weights_T.tolist(),
        "logits": toy.logits_V.tolist(),
        "k_composition_term": toy.term_VV.tolist(),
        "matching": toy.matching.model_dump(),
        "examples": {name: value.model_dump() for name, value in toy.examples.items()},
    }


def toy_lines() -> list[str]:
    """The hand-built circuit in words and numbers: blocks A, B and C of the source's log."""
    toy = toy_circuit()
    guess = "abc"[int(toy.logits_V.argmax())]
    lines = [
        f"A. An induction head built by hand (tokens a, b, c; sequence {' '.join(SEQUENCE)})",
        "  stream after layer 0 (first 3 = this token, last 3 = the token before):",
        *(f"    {SEQUENCE[place]}: {row.int().tolist()}" for place, row in enumerate(toy.stream_TD)),
        f"  scores from the last position: {_numbers(toy.scores_T, 1)}",
        f"  softmax: {_numbers(toy.weights_T, 3)}",
        f"  output as logits of a, b, c: {_numbers(toy.logits_V, 3)}, so it predicts {guess!r}",
        "B. The K-composition term W_E W_QK (W_E W_OV)^T",
        *(f"    {row}" for row in toy.term_VV.tolist()),
        f"  positivity {toy.matching.value:.2f}",
        "C. Eigenvalue positivity",
        *(f"  {name:5} {value.value:.2f}" for name, value in toy.examples.items()),
    ]
    return lines


def _numbers(values: torch.Tensor, digits: int) -> str:
    return ", ".join(f"{float(value):.{digits}f}" for value in values)

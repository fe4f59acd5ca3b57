"""What is measured of every head: heat maps of the page, columns of the terminal, keys of ``--json``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from keyshift.circuits.results import HeadResult, Positivity


class Measure(NamedTuple):
    """One number per head, None where it does not exist."""

    key: str
    title: str
    caption: str
    value: Callable[[HeadResult], float | None]
    short: str = ""  # its column in the terminal; "" leaves it out
    signed: bool = False
    unit: str = ""  # "" for what lies between 0 (signed: -1) and 1
    detail: Callable[[HeadResult], str] = lambda head: ""


def _sign(positivity: Positivity | None) -> float | None:
    """A zero matrix has no sign to show."""
    return None if positivity is None or positivity.zero else positivity.value


def _condition(positivity: Positivity | None) -> str:
    return "" if positivity is None else f"condition of the eigenvectors {positivity.condition:.2g}"


def _partner(head: HeadResult) -> str:
    through = "the head's own shift" if head.matching_with == "shift" else f"head {head.matching_with}"
    return f"through {through}, {_condition(head.matching)}"


MEASURES = (
    Measure(
        "previous_token",
        "Previous token",
        "Mean attention to the token just before.",
        lambda head: head.previous_token,
        "prev",
    ),
    Measure(
        "induction",
        "Induction",
        "Mean attention to the token after an earlier copy of the present one.",
        lambda head: head.induction,
        "ind",
    ),
    Measure(
        "induction_flow",
        "Induction by value flow",
        "The same for where the head's values came from, before they were shifted.",
        lambda head: head.induction_flow,
    ),
    Measure(
        "duplicate_token",
        "Duplicate token",
        "Mean attention to an earlier copy of the present token.",
        lambda head: head.duplicate_token,
        "dup",
    ),
    Measure(
        "first_token",
        "First token",
        "Mean attention to the first token, where many heads rest.",
        lambda head: head.first_token,
        "first",
    ),
    Measure(
        "ov",
        "Copying (OV)",
        "Eigenvalue positivity of W_U W_OV W_E: 1 where a token read is a token raised.",
        lambda head: _sign(head.ov),
        "OV",
        signed=True,
        detail=lambda head: _condition(head.ov),
    ),
    Measure(
        "copies",
        "Copied tokens",
        "Share of tokens that the output circuit raises above all others when the head reads them.",
        lambda head: head.copies,
    ),
    Measure(
        "matching",
        "Same matching",
        "Eigenvalue positivity of the QK circuit from the present token to the one before the source.",
        lambda head: _sign(head.matching),
        "match",
        signed=True,
        detail=_partner,
    ),
    Measure(
        "direct",
        "Direct matching (QK)",
        "Eigenvalue positivity of W_Eᵀ W_QK W_E: the present token against the source itself.",
        lambda head: _sign(head.direct),
        signed=True,
        detail=lambda head: _condition(head.direct),
    ),
    Measure(
        "induction_loss_increase",
        "Effect of ablation",
        "Loss on the last copy without the head minus the loss with it.",
        lambda head: head.induction_loss_increase,
        "Δloss",
        signed=True,
        unit="nats",
    ),
)

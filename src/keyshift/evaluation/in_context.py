"""In-context learning: how much better a model predicts a late token than an early one of the same text."""

from __future__ import annotations

import torch

from keyshift.errors import UserError
from keyshift.evaluation.builtin import Measure, Settings
from keyshift.evaluation.scoring import Tick, token_losses
from keyshift.evaluation.text import passages
from keyshift.opened import Opened

EARLY, LATE = 50, 500
PASSAGES = 1000
"""Unless a limit says otherwise."""


def lengths(positions: int, name: str) -> list[int]:
    """Tokens per passage, which is one length. Raises `UserError` if it does not fit."""
    if positions < LATE:
        raise UserError(
            f"--tasks icl reads {LATE} tokens and {name} has positions for {positions}; leave icl out"
        )
    return [LATE]


def in_context(opened: Opened, settings: Settings, length: int, tick: Tick) -> list[Measure]:
    """The in-context learning score of Olsson et al. 2022 (In-context Learning and Induction Heads).

    Held-out documents are cut into passages of ``length`` tokens (500, see `lengths`), each read behind the
    start token. The score is the mean loss of a passage's last token minus the mean loss of its 50th, in
    nats: below zero where the model makes use of what it has read.

    Raises:
        UserError: no text, or none as long.
    """
    text = settings.text_for("icl")
    pieces = passages(opened, text, length, settings.limit or PASSAGES)
    early, late = EARLY - 2, length - 2  # where they are predicted from, entry t being of token t + 1
    if opened.start is not None:
        pieces = torch.cat((torch.full((len(pieces), 1), opened.start), pieces), dim=1)
        early, late = early + 1, late + 1
    losses = token_losses(opened, pieces, settings.batch_size, tick).double()
    return [
        Measure("score", float((losses[:, late] - losses[:, early]).mean()), len(pieces)),
        Measure(f"loss @{EARLY}", float(losses[:, early].mean()), len(pieces)),
        Measure(f"loss @{LATE}", float(losses[:, late].mean()), len(pieces)),
    ]

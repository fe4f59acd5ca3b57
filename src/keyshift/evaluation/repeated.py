"""Repeated text: what a model gains from having read the same passage before."""

from __future__ import annotations

import torch

from keyshift.errors import UserError
from keyshift.evaluation.builtin import Measure, Settings
from keyshift.evaluation.scoring import Tick, token_losses
from keyshift.evaluation.text import passages
from keyshift.opened import Opened

SHORTEST, FACTOR = 32, 4
PASSAGES = 100
"""Unless a limit says otherwise."""


def lengths(positions: int, name: str) -> list[int]:
    """Tokens per passage: 32, 128, 512, … as long as two copies fit.

    Raises:
        UserError: not even the shortest fits.
    """
    found, length = [], SHORTEST
    while 2 * length + 1 <= positions:
        found.append(length)
        length *= FACTOR
    if not found:
        raise UserError(
            f"--tasks repeated reads {2 * SHORTEST + 1} tokens and {name} has positions for "
            f"{positions}; leave repeated out"
        )
    return found


def repeated(opened: Opened, settings: Settings, length: int, tick: Tick) -> list[Measure]:
    """Losses in nats on two copies of a passage of ``length`` tokens, one after the other behind the start
    token: in each the mean over its second token to its last, so that both are of the same tokens. The gain
    is the first minus the second.

    Raises:
        UserError: no text, or none as long.
    """
    pieces = passages(opened, settings.text_for("repeated"), length, settings.limit or PASSAGES)
    ids = torch.cat((pieces, pieces), dim=1)
    offset = 0
    if opened.start is not None:
        ids = torch.cat((torch.full((len(ids), 1), opened.start), ids), dim=1)
        offset = 1
    losses = token_losses(opened, ids, settings.batch_size, tick).double()
    first = losses[:, offset : offset + length - 1]
    second = losses[:, offset + length : offset + 2 * length - 1]
    means = float(first.mean()), float(second.mean())
    return [
        Measure(f"copy 1 @{length}", means[0], len(pieces)),
        Measure(f"copy 2 @{length}", means[1], len(pieces)),
        Measure(f"gain @{length}", means[0] - means[1], len(pieces)),
    ]

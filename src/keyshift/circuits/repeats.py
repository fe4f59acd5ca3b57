"""Repeated random tokens: the test in which nothing but induction helps.

[BOS] + n random tokens + the same n again. Shapes: S sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyshift.circuits.capture import Observer
from keyshift.circuits.model import CircuitModel
from keyshift.errors import UserError

LOGIT_BYTES = 32 << 20
"""Logits are made for so many bytes at a time (in float32), twice that at most."""
WATCHED_TOKENS = 2048
"""Without logits, so many tokens go through the model at a time."""


@dataclass(frozen=True)
class Repeats:
    """Sequences of ``repeats`` equal copies behind BOS.

    Attributes:
        ids_ST: [S, 1 + repeats · period].
        period: n, tokens per copy.
        with_replacement: whether a token may occur twice in one copy.
        seed: they were drawn with.
    """

    ids_ST: Tensor
    period: int
    repeats: int
    with_replacement: bool = False
    seed: int = 0

    def copy_slice(self, copy_index: int) -> slice:
        """Where, in a loss [S, T - 1] whose entry t predicts token t + 1, copy 1, 2, … is predicted from
        within: its tokens from the second on."""
        return slice((copy_index - 1) * self.period + 1, copy_index * self.period)

    def by_copy(self, values_ST: Tensor) -> list[float]:
        """The mean of per-prediction values [S, T - 1] inside each copy."""
        copies = range(1, self.repeats + 1)
        return [float(values_ST[:, self.copy_slice(copy)].double().mean()) for copy in copies]


def sample_repeats(
    model: CircuitModel,
    *,
    period: int = 50,
    repeats: int = 2,
    sequences: int = 100,
    seed: int = 0,
    with_replacement: bool = False,
    bos: int | None = None,
) -> Repeats:
    """Draw repeated random tokens for a model: uniformly from its vocabulary without special tokens.

    Without replacement no token occurs twice in one copy. With it, 71% of sequences hold such a collision at
    n = 50 and V = 1000, and the token after "the" earlier copy is no longer one.

    Args:
        bos: the token to begin with, where the model does not say.

    Raises:
        UserError: no BOS token, a vocabulary smaller than ``period``, more tokens than the model has
            positions for, or numbers below what makes sense.
    """
    for name, value, least in (("period", period, 2), ("repeats", repeats, 2), ("sequences", sequences, 1)):
        if value < least:
            raise UserError(f"{name}={value} must be at least {least}")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed={seed} must be between 0 and 2^63 - 1")
    start = model.bos if bos is None else bos
    if start is None:
        raise UserError(f"{model.name} has no BOS token; say which token begins a sequence (bos=…, --bos …)")
    if not 0 <= start < model.vocabulary:
        raise UserError(f"bos={start} is outside the vocabulary of {model.name} ({model.vocabulary} tokens)")
    pool = ordinary_tokens(model, start)
    if len(pool) < (1 if with_replacement else period):
        raise UserError(
            f"period={period} needs as many different tokens, and {model.name} has {len(pool)}; "
            "use a shorter period, or sample with replacement"
        )
    length = 1 + period * repeats
    if model.context is not None and length > model.context:
        raise UserError(
            f"period={period} × repeats={repeats} makes sequences of {length} tokens, and {model.name} has "
            f"positions for {model.context}; use a period of at most {(model.context - 1) // repeats}"
        )
    draw = torch.Generator().manual_seed(seed)
    if with_replacement:
        picked = torch.randint(len(pool), (sequences, period), generator=draw)
    else:
        picked = torch.stack([torch.randperm(len(pool), generator=draw)[:period] for _ in range(sequences)])
    ids = torch.cat((torch.full((sequences, 1), start), pool[picked].repeat(1, repeats)), dim=1)
    return Repeats(ids, period, repeats, with_replacement, seed)


def ordinary_tokens(model: CircuitModel, bos: int) -> Tensor:
    """Ids of the tokens that stand for text: all but BOS, special ones and rows without a token."""
    count = model.vocabulary if model.tokenizer is None else min(model.vocabulary, len(model.tokenizer))
    special = {bos, *(getattr(model.tokenizer, "all_special_ids", None) or [])}
    for name in ("eos_token_id", "pad_token_id"):
        value = getattr(model.config, name, None)
        special |= {value} if isinstance(value, int) else set(value or [])
    return torch.tensor([token for token in range(count) if token not in special])


def prediction_losses(
    model: CircuitModel,
    ids_ST: Tensor,
    mask_ST: Tensor | None = None,
    observer: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss in nats and whether the first guess is right, [S, T - 1] each; entry t predicts token t + 1.

    Sequences go through the model a few at a time, so that logits stay small.
    """
    size = max(2, LOGIT_BYTES // (4 * ids_ST.shape[1] * model.vocabulary))
    losses, right = [], []
    for ids, mask in in_batches(ids_ST, mask_ST, size):
        logits = model.logits(ids, mask, observer)[:, :-1]
        answers = ids[:, 1:].to(logits.device)
        kept = torch.promote_types(logits.dtype, torch.float32)
        losses.append(torch.nn.functional.cross_entropy(logits.mT.to(kept), answers, reduction="none").cpu())
        right.append((logits.argmax(-1) == answers).cpu())
    return torch.cat(losses), torch.cat(right)


def in_batches(
    ids_ST: Tensor, mask_ST: Tensor | None, size: int | None = None, least: int = 1
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The sequences a few at a time: at least ``size`` of them (as many as make `WATCHED_TOKENS`, and not
    below ``least``), and fewer than twice that."""
    size = max(least, WATCHED_TOKENS // ids_ST.shape[1]) if size is None else size
    pieces = max(1, len(ids_ST) // size)  # of size to 2 size - 1 sequences: never one left over
    masks = [None] * pieces if mask_ST is None else mask_ST.tensor_split(pieces)
    yield from zip(ids_ST.tensor_split(pieces), masks, strict=True)

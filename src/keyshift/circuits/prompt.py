"""A repeat inside a text, such as a made-up name in a sentence: what the model expects, and a head's part in
it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from keyshift.circuits.effect import head_effects
from keyshift.circuits.model import CircuitModel
from keyshift.circuits.results import PromptResult, PromptRow
from keyshift.circuits.streams import read_streams
from keyshift.errors import UserError

MADE_UP_NAME = "The new teacher was Mrs Brindlewick. On Monday the class met Mrs Brindlewick"


def read_prompt(model: CircuitModel, text: str, heads: list[tuple[int, int]]) -> PromptResult:
    """Every position whose token, and the token after it, stood in this order before.

    Args:
        heads: whose largest weight and logit effect are reported, one row each.

    Raises:
        UserError: as `check_text`.
    """
    ids, places = check_text(model, text)
    streams = read_streams(model, ids)
    tokens = [model.token(int(token)) for token in ids[0]]
    after = torch.cat((ids[:, 1:], ids[:, -1:]), dim=1)
    probabilities = model.logits(ids).float().softmax(-1)
    rows = []
    for layer, head in heads:
        model.check_head(layer, head)
        effects = head_effects(model, streams, layer, after)[0, :, head]
        pattern = streams.calls[layer].pattern()[0, head]
        for place in places:
            reads = int(pattern[place].argmax())
            rows.append(
                PromptRow(
                    position=place,
                    token=tokens[place],
                    next_token=tokens[place + 1],
                    probability=float(probabilities[0, place, after[0, place]]),
                    head=f"{layer}.{head}",
                    reads=tokens[reads],
                    reads_position=reads,
                    weight=float(pattern[place, reads]),
                    logit=float(effects[place]),
                )
            )
    return PromptResult(text=text, tokens=tokens, rows=rows)


def check_text(model: CircuitModel, text: str) -> tuple[Tensor, list[int]]:
    """A text's token ids [1, T], and where it repeats a pair.

    Raises:
        UserError: no tokenizer; a text that repeats nothing, or one that is too long for the model.
    """
    ids = model.encode(text)
    model.check_tokens(ids)
    places = repeated_pairs(ids[0])
    if not places:
        raise UserError(f"text={text[:40]!r} repeats no pair of tokens: nothing for induction to complete")
    return ids, places


def repeated_pairs(ids_T: Tensor) -> list[int]:
    """Positions i for which tokens i, i + 1 stood next to each other, in this order, before."""
    ids, seen, places = ids_T.tolist(), set(), []
    for place, pair in enumerate(pairwise(ids)):
        if pair in seen:
            places.append(place)
        seen.add(pair)
    return places

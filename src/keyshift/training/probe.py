"""Heads measured while they form: what they attend to on repeated random tokens, and what they mix."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from keyshift.circuits.capture import Observer, tap_interface
from keyshift.circuits.repeats import Repeats
from keyshift.circuits.scores import head_scores
from keyshift.errors import UserError
from keyshift.measure import learned_shifts
from keyshift.modeling import Block, KeyshiftForCausalLM
from keyshift.training.lines import Lines
from keyshift.training.trainer import KeyshiftTrainer

FILE = "probes.jsonl"

SEQUENCES = 8
"""One small batch: a score's noise is a few hundredths."""

PERIOD = 50
"""Tokens per copy, or as many as fit."""


class Probe(TrainerCallback):
    """Every so many steps, at the first and at the last: a line in ``probes.jsonl``, and the best head's
    scores among the metrics, so that the moment when induction forms is seen.
    """

    def __init__(self, trainer: KeyshiftTrainer, every: int, lines: Lines):
        self.trainer, self.every, self.lines = trainer, every, lines
        length = trainer.model.config.max_position_embeddings
        if length < 5:
            raise UserError(
                f"training.probe_steps={every} needs sequences of 5 tokens, to repeat two, not {length}; "
                "leave it out"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._measure(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        model: Any = self.trainer.model
        heads = head_table(model)
        shifts = [each.model_dump() for each in learned_shifts(model)]
        self.lines.write({"step": step, "heads": heads, "shifts": shifts})
        kinds = ("induction", "previous_token")
        self.trainer.log({f"probe_{kind}": max(head[kind] for head in heads) for kind in kinds})


def head_table(model: KeyshiftForCausalLM, seed: int = 0) -> list[dict[str, Any]]:
    """Every head's scores on `SEQUENCES` repeats of random tokens, the same ones at every call.

    Returns:
        ``layer``, ``head``, ``previous_token`` and ``induction`` (0 to 1; by the convention of the paper, see
        `keyshift.circuits.marks`); where values are shifted, ``induction`` is that of the value flow if it is
        the larger: where information comes from, not where attention points.
    """
    opened = _Opened(model)
    training = model.training
    scores = head_scores(opened, opened.repeats(seed))
    model.train(training)
    rows = []
    for layer, (kinds, flow) in enumerate(zip(scores.scores, scores.induction_flow, strict=True)):
        induction = kinds["induction"] if flow is None else torch.maximum(kinds["induction"], flow)
        for head, (previous, found) in enumerate(zip(kinds["previous_token"], induction, strict=True)):
            row = {"layer": layer, "head": head, "previous_token": float(previous), "induction": float(found)}
            rows.append(row)
    return rows


class _Layer:
    """An attention layer as `head_scores` wants it."""

    def __init__(self, attention: nn.Module, heads: int):
        self.attention, self.heads = attention, heads


class _Opened:
    """A keyshift model as `head_scores` wants it. Its parts are known, so nothing is found out or checked,
    and it may be sharded over processes or compiled.
    """

    def __init__(self, model: KeyshiftForCausalLM):
        self.model, self.device = model, model.device
        heads = model.config.num_attention_heads
        self.layers = [
            _Layer(block.self_attn, heads) for block in cast(list[Block], list(model.model.layers))
        ]

    def repeats(self, seed: int) -> Repeats:
        """Sequences that begin with the model's BOS token, or with token 0 where it has none."""
        config = self.model.config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        bos = config.bos_token_id or 0
        pool = torch.tensor(sorted(set(range(config.vocab_size)) - {bos, *ends}))
        period = min(PERIOD, (config.max_position_embeddings - 1) // 2, len(pool))
        draw = torch.Generator().manual_seed(seed)
        picked = torch.stack([torch.randperm(len(pool), generator=draw)[:period] for _ in range(SEQUENCES)])
        start = torch.full((SEQUENCES, 1), bos)
        return Repeats(torch.cat((start, pool[picked].repeat(1, 2)), dim=1), period, 2, seed=seed)

    @torch.no_grad()
    def watch(self, ids_BT: Tensor, mask_BT: Tensor | None, observer: Observer) -> None:
        """One forward pass; compiled blocks would run past the observer, so they do not compile here."""
        self.model.eval()
        with torch.compiler.set_stance("force_eager"), tap_interface(self.model, observer):
            self.model(ids_BT, attention_mask=mask_BT, use_cache=False, logits_to_keep=1)

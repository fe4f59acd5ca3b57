"""A model trained to compute what another one does: the same logits, layer by layer the same attention.

The loss of a step is

    w_logits · KL(teacher ‖ model) + w_attention · error + w_labels · cross-entropy,

KL and cross-entropy in nats, means over the predicted tokens of the step; ``error`` is the mean over layers
of ‖model − teacher‖² / ‖teacher‖² of what attention adds to the residual stream, over all tokens. Each
model's attention is given its own hidden states: one forward pass of each is enough, and later layers learn
to live with what earlier ones get wrong. The norms of the teacher are those of the run's first batch, so that
the loss is a plain sum over rows, whichever micro-batch or process has them.

Shapes: B rows of a micro-batch, T tokens of a row, E hidden size, V vocabulary, N tokens of a chunk, L
layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from keyshift.attention.module import attentions
from keyshift.data import IGNORED_LABEL
from keyshift.errors import UserError
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.opened import fingerprint
from keyshift.recipe import Training
from keyshift.teacher import open_teacher
from keyshift.training.processes import total

PARTS = ("kl", "attention_error", "label_loss")
"""What the loss is made of, in the order of its weights, as ``metrics.jsonl`` calls it."""

LOGITS_AT_A_TIME = 2**25
"""So many of the teacher's logits, and as many probabilities of either model, are held at once at most: a
vocabulary is large, and logits of both models in float32 are what memory would go to."""


class Distillation:
    """The loss of a model that learns from ``teacher``, and where its parts stand.

    Args:
        teacher: is frozen and put into evaluation mode. It computes in the dtype of its weights.
        settings: the weights of the parts.
        fingerprint: of the teacher, by which a run that goes on knows it again.
    """

    def __init__(self, teacher: KeyshiftForCausalLM, settings: Training, fingerprint: str = ""):
        self.teacher = teacher.requires_grad_(False).eval()
        self.fingerprint = fingerprint
        weights = (settings.distil_logits, settings.distil_attention, settings.distil_labels)
        self.weights = torch.tensor(weights, device=teacher.device)
        self.attention = settings.distil_attention > 0
        self.energies = torch.ones(teacher.config.num_hidden_layers, device=teacher.device)
        self.sums = torch.zeros(len(PARTS), device=teacher.device)

    @classmethod
    def of(
        cls, settings: Training, tokenizer: Path | None, device: torch.device, dtype: torch.dtype
    ) -> Distillation | None:
        """That of a recipe's settings; None where they name no teacher.

        Raises:
            UserError: what `open_teacher` refuses.
        """
        if settings.distil_from is None:
            return None
        teacher = open_teacher(settings.distil_from, tokenizer)
        return cls(teacher.to(device, dtype), settings, fingerprint(teacher, None))

    @torch.no_grad()
    def measure(self, batches: Iterable[dict[str, Tensor]]) -> None:
        """Take the norms of the teacher's attention from this process's part of a batch. All must call."""
        if not self.attention:
            return
        self.energies = torch.zeros_like(self.energies)
        for batch in batches:
            inputs = {name: rows.to(self.teacher.device) for name, rows in batch.items() if name != "labels"}
            _, outputs = self._taught(inputs)
            self.energies += torch.stack([output.float().square().sum() for output in outputs])
        total(self.energies).clamp_(min=torch.finfo(torch.float32).tiny)

    def loss(
        self, wrapped: nn.Module, model: KeyshiftForCausalLM, batch: dict[str, Tensor], labels: Tensor | int
    ) -> Tensor:
        """A micro-batch's share of the step's loss, of which gradients can be taken.

        Args:
            wrapped: what computes ``model``: itself, or with what makes processes share its gradients.
            batch: as the model takes it, with ``labels``.
            labels: how many tokens the whole step predicts, over all micro-batches and processes.
        """
        inputs = {name: rows for name, rows in batch.items() if name != "labels"}
        hidden, wanted = self._taught(inputs)
        with attention_outputs(model, self.attention) as outputs:
            logits = wrapped(**inputs, use_cache=False).logits
        kl, label_loss = self._against_logits(logits, hidden, batch["labels"]) / labels
        parts = torch.stack((kl, self._attention_error(outputs, wanted), label_loss))
        self.sums += parts.detach()
        return self.weights @ parts

    @torch.no_grad()
    def _taught(self, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The teacher's last hidden states [B, T, E], and what its attention adds, L of [B, T, E]."""
        with attention_outputs(self.teacher, self.attention) as outputs:
            hidden = self.teacher.model(**inputs, use_cache=False).last_hidden_state
        return hidden, outputs

    def _attention_error(self, outputs: list[Tensor], wanted: list[Tensor]) -> Tensor:
        if not self.attention:
            return self.sums.new_zeros(())
        errors = [
            (own.float() - theirs.float()).square().sum() / energy
            for own, theirs, energy in zip(outputs, wanted, self.energies, strict=True)
        ]
        return torch.stack(errors).mean()

    def _against_logits(self, logits_BTV: Tensor, hidden_BTE: Tensor, labels_BT: Tensor) -> Tensor:
        """KL and cross-entropy, summed over predicted tokens, [2]; a chunk of them at a time."""
        following = pad(labels_BT[:, 1:], (0, 1), value=IGNORED_LABEL).flatten()
        size = max(1, LOGITS_AT_A_TIME // logits_BTV.shape[-1])
        chunks = (
            each.split(size) for each in (logits_BTV.flatten(0, 1), hidden_BTE.flatten(0, 1), following)
        )
        sums = [
            checkpoint(self._of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(*chunks, strict=True)
        ]
        return torch.stack(sums).sum(0)

    def _of_chunk(self, logits_NV: Tensor, hidden_NE: Tensor, following_N: Tensor) -> Tensor:
        """Written so that of equal logits not only the KL is 0 but, to the last bit, its gradient: Adam would
        make steps of any size of what rounding leaves."""
        own, theirs = logits_NV.float(), self.teacher.lm_head(hidden_NE).float()
        own_total, their_total = own.logsumexp(-1), theirs.logsumexp(-1)
        probabilities = (theirs - their_total[:, None]).exp()
        kl = own_total - their_total + (probabilities * (theirs - own)).sum(-1)
        label = own_total - own.gather(-1, following_N.clamp(min=0)[:, None])[:, 0]
        return torch.stack((kl, label)).masked_fill(following_N == IGNORED_LABEL, 0.0).sum(-1)

    def parts(self) -> dict[str, float]:
        """The parts of the loss since the last call, over all processes, which all must call."""
        found = dict(zip(PARTS, total(self.sums).tolist(), strict=True))
        self.sums.zero_()
        return found if self.attention else {name: found[name] for name in PARTS if name != "attention_error"}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON."""
        return {"teacher": self.fingerprint, "energies": self.energies.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises `UserError` if it was another teacher's."""
        if state.get("teacher") != self.fingerprint:
            raise UserError(
                "training.distil_from is another model than the one that this run began with; bring that one "
                "back, or pass another --out"
            )
        self.energies = torch.tensor(state["energies"], device=self.energies.device)


@contextmanager
def attention_outputs(model: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """What every layer's attention gives while the context lasts, [B, T, E] each; nothing unless ``wanted``.

    Outputs are only collected here: a hook that computed with them would do it again when a block is computed
    again for gradient checkpointing.
    """
    found: list[Tensor] = []
    layers = attentions(model) if wanted else []
    hooks = [layer.register_forward_hook(lambda _, __, result: found.append(result[0])) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()

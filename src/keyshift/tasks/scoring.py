"""How right a model is about batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from keyshift.tasks.induction import IGNORED

if TYPE_CHECKING:
    from torch import Tensor


def score(model: Any, batches: Iterable[dict[str, Tensor]]) -> tuple[float, int, int]:
    """Summed loss in nats, correct predictions and predictions of ``model``, over the labels that count.

    The model is in evaluation mode meanwhile.
    """
    import torch

    loss, correct, count = 0.0, 0, 0
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in batches:
            batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch, use_cache=False).logits[:, :-1]
            counted = labels != IGNORED
            logits, answers = logits[counted].float(), labels[counted]
            loss += torch.nn.functional.cross_entropy(logits, answers, reduction="sum").item()
            correct += int((logits.argmax(-1) == answers).sum())
            count += len(answers)
    model.train(training)
    return loss, correct, count

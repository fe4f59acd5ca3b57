"""Where batches come from: a task, prepared text, or both. A batch is a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from keyshift.data import Mixture, StreamedText, TextData, load_tokenizer, separator_id
from keyshift.data.streaming import StreamedTokens
from keyshift.tasks import Examined, Task
from keyshift.tasks.scoring import score
from keyshift.training.processes import shared_out, total

Batch = dict[str, Tensor]
Corpus = TextData | Mixture | StreamedText


class BatchSource(Protocol):
    """What training needs of its data."""

    vocab_size: int
    sequence_length: int
    tokenizer_path: Path | None
    """The folder of the tokenizer that made the tokens, if one did; saved with every checkpoint."""
    special_tokens: dict[str, int]
    """Fields of the model's configuration, such as ``bos_token_id``."""
    fingerprint: str | None
    """Of the data, where they could change under a run that is to go on."""

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """``input_ids``, ``labels`` and whatever else the model takes, [batch_size, sequence_length],
        int64."""
        ...

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        """Held-out ``loss`` (nats per predicted token) and more; the same data at every call."""
        ...

    def examine(self, model: Any) -> dict[str, float]:
        """Scores of a trained model, by name, from 0 to 1: what takes too long for every evaluation."""
        ...


@dataclass
class TaskSource:
    """A synthetic task. Validation adds ``accuracy`` where the answer is determined."""

    task: Task
    vocab_size: int = field(init=False)
    sequence_length: int = field(init=False)
    tokenizer_path: Path | None = field(init=False, default=None)
    special_tokens: dict[str, int] = field(init=False, default_factory=dict)
    fingerprint: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.vocab_size = self.task.vocab_size
        self.sequence_length = self.task.sequence_length

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        return self.task.batch(seed, step, batch_size)

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        held_out = (self.task.batch(0, step, batch_size, "validation") for step in range(batches))
        loss, correct, count = _score(model, held_out)
        return {"loss": loss / count, "accuracy": correct / count}

    def examine(self, model: Any) -> dict[str, float]:
        model.eval()
        return self.task.examine(model) if isinstance(self.task, Examined) else {}


@dataclass
class TextSource:
    """Prepared text, of one store or of several. Validation adds ``bits_per_byte``; of several, each one's
    ``loss/NAME``, of which ``loss`` is the mean by their shares.
    """

    data: Corpus
    sequence_length: int
    vocab_size: int = field(init=False)
    tokenizer_path: Path | None = field(init=False)
    special_tokens: dict[str, int] = field(init=False)
    fingerprint: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = self.data.vocab_size
        self.fingerprint = _fingerprint(self.data)
        self.tokenizer_path = self.data.tokenizer_path
        self.special_tokens = _special_tokens(self.data)

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        text = cast(TextData | Mixture, self.data)
        return text.train.batch(step, batch_size, self.sequence_length, seed)

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        losses, bits = {}, {}
        for name, side in self.data.validations.items():
            held_out = side.sequential(batch_size, self.sequence_length, batches)
            loss, _, count = _score(model, held_out)
            losses[name] = loss / count
            bits[name] = side.bits_per_byte(losses[name])
        shares = self.data.weights
        means = {
            "loss": sum(shares[name] * loss for name, loss in losses.items()),
            "bits_per_byte": sum(shares[name] * each for name, each in bits.items()),
        }
        return means if len(losses) == 1 else {**means, **{f"loss/{n}": loss for n, loss in losses.items()}}

    def examine(self, model: Any) -> dict[str, float]:
        return {}


@dataclass
class StreamSource(TextSource):
    """Text tokenised as it comes. Its place is part of a checkpoint, lest everything be read again."""

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        return self._stream().rows(step * batch_size, batch_size, self.sequence_length)

    def state_dict(self, step: int, batch_size: int) -> dict[str, Any]:
        """Where step ``step`` begins."""
        return self._stream().state_dict(step * batch_size, self.sequence_length)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._stream().load_state_dict(state)

    def _stream(self) -> StreamedTokens:
        return cast(StreamedText, self.data).train


def _fingerprint(data: Corpus) -> str:
    """A hash of the tokens: stores list the checksums of all their files; of a stream, of its tokenizer."""
    if isinstance(data, StreamedText):
        return data.tokenizer_fingerprint
    stores = data.stores if isinstance(data, Mixture) else {"text": data}
    facts = [[name, data.weights[name], _meta(store)] for name, store in sorted(stores.items())]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _meta(store: TextData) -> str:
    """What a store says of itself; of tokens put together in memory, how many there are."""
    if store.directory is None:
        return str(store.train.token_count)
    meta = json.loads((store.directory / "meta.json").read_text())
    return json.dumps([meta["shards"], meta["tokenizer_fingerprint"]])


def _special_tokens(data: Corpus) -> dict[str, int]:
    """What documents begin and end with, as a model's configuration names it."""
    tokenizer = load_tokenizer(data.tokenizer_path)
    end = tokenizer.eos_token_id if data.end_token is None else data.end_token
    found = {"bos_token_id": separator_id(tokenizer), "eos_token_id": end}
    return {name: token for name, token in found.items() if token is not None}


@dataclass
class MixedSource:
    """Text and a task in every batch, the task in ``share`` of the rows (rounded).

    Validation gives the text's ``loss`` and ``bits_per_byte`` and the task's ``accuracy``.
    """

    text: TextSource
    task: TaskSource
    share: float
    vocab_size: int = field(init=False)
    sequence_length: int = field(init=False)
    tokenizer_path: Path | None = field(init=False)
    special_tokens: dict[str, int] = field(init=False)
    fingerprint: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer_path = self.text.tokenizer_path
        self.fingerprint = self.text.fingerprint
        self.special_tokens = self.text.special_tokens
        self.vocab_size = self.text.vocab_size
        self.sequence_length = self.text.sequence_length

    def train_batch(self, seed: int, step: int, batch_size: int) -> Batch:
        of_task = round(self.share * batch_size)
        text = self.text.train_batch(seed, step, batch_size - of_task)
        task = self.task.train_batch(seed, step, of_task)
        task["position_ids"] = torch.arange(self.sequence_length).expand(of_task, -1)
        return {name: torch.cat((rows, task[name])) for name, rows in text.items()}

    def validate(self, model: Any, batch_size: int, batches: int) -> dict[str, float]:
        measured = self.text.validate(model, batch_size, batches)
        return {**measured, "accuracy": self.task.validate(model, batch_size, batches)["accuracy"]}

    def examine(self, model: Any) -> dict[str, float]:
        return self.task.examine(model)


def _score(model: Any, batches: Iterable[Batch]) -> tuple[float, int, int]:
    """As `score`, the batches shared out over processes."""
    sums = torch.tensor(score(model, shared_out(batches)), dtype=torch.float64, device=model.device)
    loss, correct, count = total(sums).tolist()
    return loss, int(correct), max(int(count), 1)

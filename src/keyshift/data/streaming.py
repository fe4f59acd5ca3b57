"""Training text without preparing it: documents tokenised and packed as they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keyshift.data.encoding import Encoder
from keyshift.data.shards import MemoryShard
from keyshift.data.sources import Source
from keyshift.data.stream import TokenStream
from keyshift.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from keyshift.errors import UserError

if TYPE_CHECKING:
    import torch

_CHUNK_DOCUMENTS = 256  # read, tokenised and remembered at a time
_ANCHORS = 4096
"""So many chunks back, a state can still be asked for without reading from the start: a million documents."""


class StreamedText:
    """A corpus that is tokenised while it is trained on. It has what training needs of a ``TextData``.

    Documents come in the order of the source, again and again. Held-out ones, by the rule of ``prepare``, are
    never trained on; those in the first ``validation_bytes`` are kept for validation. Every process reads and
    tokenises all of the source, so with more than a few, or for several runs, ``prepare`` it instead.

    Args:
        source: a ``FileSource`` or a ``DatasetSource``.
        tokenizer: a folder, a ``tokenizer.json`` or a hub name.
        directory: where the tokenizer is saved, in a folder ``tokenizer``.
        end_token: whether an end token follows every document.

    Raises:
        UserError: what the source and the tokenizer functions reject; no held-out document in that part.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: str,
        directory: str | Path,
        *,
        validation_fraction: float = 0.05,
        end_token: bool = True,
        validation_bytes: int = 64 * 1024 * 1024,
    ):
        self.tokenizer_path = Path(directory) / "tokenizer"
        _save_tokenizer(tokenizer, self.tokenizer_path)
        self.tokenizer_fingerprint = tokenizer_fingerprint(self.tokenizer_path)
        encoder = Encoder.load(self.tokenizer_path, end_token, validation_fraction)
        self.vocab_size, self.end_token = encoder.vocab_size, encoder.end
        self.validation = _held_out(source, encoder, validation_bytes)
        self.train = StreamedTokens(source, encoder)

    @property
    def validations(self) -> dict[str, TokenStream]:
        """What is held out, by source; a ``Mixture`` has several."""
        return {"text": self.validation}

    @property
    def weights(self) -> dict[str, float]:
        """The share of each source."""
        return {"text": 1.0}

    def summary(self) -> dict[str, Any]:
        """Facts for a report, as of a ``TextData``; how much there is to train on is not known."""
        held_out = self.validation
        counts = {
            "tokens": held_out.token_count,
            "bytes": held_out.text_bytes,
            "documents": held_out.document_count,
        }
        tokens_per_byte = held_out.text_tokens / held_out.text_bytes
        return {"validation": counts, "vocab_size": self.vocab_size, "tokens_per_byte": tokens_per_byte}


def _save_tokenizer(tokenizer: str, folder: Path) -> None:
    """Saves it in ``folder``, which another process may be doing too."""
    temporary = folder.with_name(f".{folder.name}-{os.getpid()}.tmp")
    load_tokenizer(tokenizer).save_pretrained(temporary)
    try:
        temporary.rename(folder)
    except OSError as error:  # it is there
        same = folder.is_dir() and tokenizer_fingerprint(folder) == tokenizer_fingerprint(temporary)
        shutil.rmtree(temporary)
        if not same:
            raise UserError(
                f"{folder}: holds another tokenizer than {tokenizer!r}; pass another folder"
            ) from error


def _held_out(source: Source, encoder: Encoder, limit: int) -> TokenStream:
    def documents() -> Iterator[str]:
        left = limit
        for document in source.read():
            if left <= 0:
                return
            left -= len(document.encode())
            if encoder.held_out(document):
                yield document

    shard = _packed(documents(), encoder)
    if shard.document_count == 0:
        raise UserError(
            f"validation_fraction is {encoder.validation_fraction}: it holds out no document of the first "
            f"{limit} bytes; raise it"
        )
    return TokenStream([shard], end_tokens=encoder.end is not None)


def _packed(documents: Iterator[str], encoder: Encoder) -> MemoryShard:
    """Documents as a shard."""
    pieces, starts, count, text_bytes = [], [], 0, 0
    for document, ids in encoder.encoded(documents):
        pieces.append(np.array(ids, encoder.dtype))
        starts.append(count)
        count += len(ids)
        text_bytes += len(document.encode())
    tokens = np.concatenate(pieces) if pieces else np.empty(0, encoder.dtype)
    return MemoryShard(tokens, np.array(starts, np.int64), text_bytes)


@dataclass(frozen=True)
class _Anchor:
    """A place between two chunks: how far into the endless stream, in which epoch, where in the source."""

    token: int
    epoch: int
    position: Any


@dataclass
class StreamedTokens:
    """The training side of a ``StreamedText``: one endless sequence of tokens, cut into rows."""

    source: Source
    encoder: Encoder
    _anchors: deque[_Anchor] = field(default_factory=lambda: deque(maxlen=_ANCHORS))

    def __post_init__(self) -> None:
        self._start(_Anchor(0, 0, None))

    def rows(self, first: int, count: int, sequence_length: int) -> dict[str, torch.Tensor]:
        """Rows ``first`` to ``first + count - 1``, as ``TokenStream.rows`` returns them.

        Row r is the tokens r × sequence_length and on, whoever asks and in whatever portions, so several
        processes each take theirs. What is asked for should move on: going back reads again, from an earlier
        chunk or the start.
        """
        begin, end = first * sequence_length, (first + count) * sequence_length
        if begin < self._base:
            self._start(self._anchor(begin))
        while self._end < end:
            self._advance(begin)
        stream = TokenStream(list(self._chunks))
        firsts = np.arange(begin, end, sequence_length, dtype=np.int64) - self._base
        return stream.packed(firsts, sequence_length)

    def state_dict(self, row: int, sequence_length: int) -> dict[str, Any]:
        """Where to read on for row ``row``, the first not used yet: JSON, for any number of processes."""
        return {"source": self._facts(), **vars(self._anchor(row * sequence_length))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state, without reading what came before.

        A source that cannot be taken up reads that once more, without tokenising it. Raises ``UserError`` for
        a state of other text.
        """
        state = dict(state)
        if state.pop("source") != self._facts():
            raise UserError("the state is of other text, or its files changed; go on with the same text")
        self._start(_Anchor(**state))

    def _facts(self) -> Any:
        return json.loads(json.dumps([self.source.facts(), self.encoder.settings]))

    def _anchor(self, token: int) -> _Anchor:
        """The last place known from which that token can be reached."""
        known = (anchor for anchor in reversed(self._anchors) if anchor.token <= token)
        return next(known, _Anchor(0, 0, None))

    def _start(self, anchor: _Anchor) -> None:
        """Begins to read at an anchor, with nothing in memory."""
        while self._anchors and self._anchors[-1].token >= anchor.token:
            self._anchors.pop()
        self._chunks: deque[MemoryShard] = deque()
        self._base = self._end = anchor.token
        self._read(anchor)

    def _read(self, anchor: _Anchor) -> None:
        self._anchors.append(anchor)
        self._epoch, self._epoch_began, self._whole = anchor.epoch, anchor.token, anchor.position is None
        self._reading = self.source.read(anchor.position)
        self._documents = iter(self._reading)

    def _advance(self, needed: int) -> None:
        """Tokenises the next chunk, and forgets those that end before token ``needed``."""
        documents = list(islice(self._documents, _CHUNK_DOCUMENTS))
        if not documents:
            self._repeat()
            return
        shard = _packed((each for each in documents if not self.encoder.held_out(each)), self.encoder)
        self._chunks.append(shard)
        self._end += shard.token_count
        self._anchors.append(_Anchor(self._end, self._epoch, self._reading.position))
        while self._chunks and self._base + self._chunks[0].token_count <= needed:
            self._base += self._chunks.popleft().token_count

    def _repeat(self) -> None:
        """The source is through: from its start again."""
        if self._whole and self._end == self._epoch_began:
            raise UserError("the text holds no document to train on; lower validation_fraction or pass more")
        self._read(_Anchor(self._end, self._epoch + 1, None))

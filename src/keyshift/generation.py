"""A prompt continued, or a conversation answered, token by token: what ``keyshift generate`` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList, TextStreamer, set_seed

from keyshift.cache import KeyshiftCache
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError
from keyshift.modeling import CACHE_NAME
from keyshift.opened import Opened

Message = dict[str, str]
"""One turn: ``role`` (user, assistant, system) and ``content``."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: at most so many; fewer where the model ends its text, or has no more positions.
        temperature: 0 takes the likeliest token.
        top_p: draws among the likeliest tokens that together are so likely.
        seed: of the draws.
        cache_dtype: ``int8`` or ``int4`` rounds what is cached, of keyshift models.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    cache_dtype: str | None = None

    def check(self) -> None:
        """Raises `UserError` for a number out of range."""
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature={self.temperature} must be 0 (no draws) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p={self.top_p} must be above 0 and at most 1")


@dataclass(frozen=True)
class Answer:
    """What came of a prompt.

    Attributes:
        seconds: from the prompt to the last token; ``first_seconds`` to the first one.
        cache_bytes: allocated for the cache at the end.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    first_seconds: float
    seconds: float
    cache_bytes: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of all tokens but the first; None for one alone."""
        later = self.seconds - self.first_seconds
        return (self.new_tokens - 1) / later if self.new_tokens > 1 and later > 0 else None


def prompt_ids(opened: Opened, prompt: str | Sequence[Message]) -> Tensor:
    """The tokens of a prompt, [1, T].

    Args:
        prompt: text to continue, which begins with the model's start token; or a conversation, put into the
            tokenizer's chat template.

    Raises:
        UserError: a conversation without a template for it, an empty prompt, one that leaves no position.
    """
    if isinstance(prompt, str):
        ids = opened.encode(prompt)
    elif opened.tokenizer.chat_template is None:
        raise UserError(f"the tokenizer of {opened.name} has no chat template; pass --raw to continue text")
    else:
        ids = opened.tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    if not ids:
        raise UserError("PROMPT is empty; pass some text")
    if len(ids) >= opened.positions:
        raise UserError(
            f"PROMPT has {len(ids)} tokens and {opened.name} positions for {opened.positions}; shorten it"
        )
    return torch.tensor([ids], device=opened.model.device)


def answer(
    opened: Opened,
    ids: Tensor,
    sampling: Sampling,
    *,
    write: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
) -> Answer:
    """Generate after ``ids`` [1, T].

    Args:
        write: called with every piece of text as soon as it is sure.
        stop: asked after every token; True ends the text there.
    """
    sampling.check()
    set_seed(sampling.seed)
    model, cache = opened.model, _cache(opened.model, sampling)
    room = min(sampling.max_new_tokens, opened.positions - ids.shape[1])
    draws = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
    watch = _Watch(stop)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=room,
        pad_token_id=opened.tokenizer.eos_token_id,  # transformers warns without one; nothing is padded
        streamer=_Written(opened.tokenizer, write),
        stopping_criteria=StoppingCriteriaList([watch]),
        **(draws if sampling.temperature else {"do_sample": False, "temperature": None, "top_p": None}),
        **{CACHE_NAME: cache},
    )
    new = out[0, ids.shape[1] :]
    return Answer(
        text=cast(str, opened.tokenizer.decode(new, skip_special_tokens=True)),
        prompt_tokens=ids.shape[1],
        new_tokens=len(new),
        first_seconds=watch.first or 0.0,
        seconds=watch.last,
        cache_bytes=_bytes(cache),
    )


class _Watch(StoppingCriteria):
    """Asked after every token: when it came, and whether it was the last."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop, self.began = stop, time.perf_counter()
        self.first: float | None = None
        self.last = 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.last = time.perf_counter() - self.began
        self.first = self.last if self.first is None else self.first
        return torch.full((len(input_ids),), self.stop(), device=input_ids.device, dtype=torch.bool)


class _Written(TextStreamer):
    """Text handed on as soon as no later token can change it."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def _cache(model: Any, sampling: Sampling) -> Any:
    if isinstance(model.config, KeyshiftConfig):
        return KeyshiftCache(model.config, cache_dtype=sampling.cache_dtype)
    if sampling.cache_dtype is not None:
        raise UserError(
            f"--cache-dtype={sampling.cache_dtype!r} rounds the cache of keyshift models; leave it out"
        )
    return DynamicCache(config=model.config)


def _bytes(cache: Any) -> int:
    if isinstance(cache, KeyshiftCache):
        return cache.allocated_bytes
    streams = (stream for layer in cache.layers for stream in (layer.keys, layer.values))
    return sum(stream.untyped_storage().nbytes() for stream in streams if stream is not None)

"""A checkpoint as the harness's model: one start token per request, answers kept, cut requests counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from keyshift.errors import UserError
from keyshift.evaluation.answers import Answers, key_of
from keyshift.opened import Opened, with_start

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and of how much."""


class Model(HFLM):
    """The harness's Hugging Face model, asked only what it has not answered before."""

    def __init__(self, opened: Opened, answers: Answers, batch_size: int, progress: Progress):
        if opened.tokenizer.pad_token_id is None:  # the harness would add a token that has no embedding
            ends = opened.tokenizer.eos_token, opened.tokenizer.bos_token
            opened.tokenizer.pad_token = next(token for token in ends if token is not None)
        super().__init__(
            pretrained=opened.model,
            tokenizer=opened.tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_length=opened.positions,
            prefix_token_id=opened.start,
        )
        self.opened, self.answers, self.progress = opened, answers, progress
        self.requests: Counter[str] = Counter()
        self.truncated: Counter[str] = Counter()
        self.cut: set[Any] = set()
        self.begins = True  # whether encoded text begins with the start token
        self.doing, self.done, self.total = "", 0, 0
        self.cache_hook = self  # the harness calls its add_partial for every answer

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[Any]:
        return [tuple(answer) for answer in self._ask("loglikelihood", requests, super().loglikelihood)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        self.begins = False  # the harness itself puts the start token before the first window
        try:
            return self._ask("loglikelihood_rolling", requests, super().loglikelihood_rolling)
        finally:
            self.begins = True

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        for request in requests:
            self._check_room(request.task_name, request.args[1])
        return self._ask("generate_until", requests, super().generate_until)

    def _ask(self, kind: str, requests: list[Any], ask: Callable[..., list[Any]]) -> list[Any]:
        """The answers to all requests; only new ones are asked for."""
        kept = [None if _sampled(request) else self._kept(kind, request.args) for request in requests]
        missing = [request for request, known in zip(requests, kept, strict=True) if known is None]
        self.done, self.total = len(requests) - len(missing), len(requests)
        self.doing = _doing(requests)
        self.progress(self.doing, self.done, self.total)
        fresh = iter(ask(missing, disable_tqdm=True) if missing else [])
        found = []
        for request, known in zip(requests, kept, strict=True):
            answer, cut = (next(fresh), _shown(request.args) in self.cut) if known is None else known
            found.append(answer)
            self.requests[request.task_name] += 1
            self.truncated[request.task_name] += cut
        return found

    def _kept(self, kind: str, arguments: Any) -> Any:
        return self.answers.get(self._key(kind, arguments))

    def _key(self, kind: str, arguments: Any) -> bytes:
        return key_of(kind, list(arguments), self.opened.start, self.opened.positions)

    def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
        """Called by the harness with every answer."""
        sampled = kind == "generate_until" and arguments[1].get("do_sample")
        if not sampled:
            self.answers.put(self._key(kind, arguments), [answer, _shown(arguments) in self.cut])
        self.done += 1
        self.progress(self.doing, min(self.done, self.total), self.total)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=False)
        if self.begins and add_special_tokens is not False:
            ids = with_start(ids, self.opened.start)
        return ids if left_truncate_len is None else self._shortened(ids, left_truncate_len)

    def tok_batch_encode(
        self, strings: Sequence[str], left_truncate_len: int | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for string in strings:
            ids = self.tok_encode(string)
            if left_truncate_len is not None and len(ids) > left_truncate_len:
                self.cut.add(string)
                ids = self._shortened(ids, left_truncate_len)
            rows.append(ids)
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> list[Any]:
        fitting = [self._fitting(*request) for request in requests]
        return super()._loglikelihood_tokens(fitting, disable_tqdm=True, override_bs=override_bs)

    def _fitting(
        self, strings: Any, context: list[int], answer: list[int]
    ) -> tuple[Any, list[int], list[int]]:
        """A request that fits; the harness would cut off the start token too."""
        room = self.opened.positions + 1 - len(answer)  # the last token is not read
        if room < 1:
            raise UserError(
                f"{self.doing}: an answer of {len(answer)} tokens, and {self.opened.name} has positions for "
                f"{self.opened.positions}; leave this task out"
            )
        if len(context) > room:
            self.cut.add(strings)
            context = self._shortened(context, room)
        return strings, context, answer

    def _shortened(self, ids: list[int], length: int) -> list[int]:
        """The last ``length`` tokens, the first of them still the start token."""
        if len(ids) <= length:
            return ids
        if self.opened.start is None or ids[0] != self.opened.start:
            return ids[-length:]
        return [self.opened.start, *ids[len(ids) - length + 1 :]]

    def _check_room(self, task: str, settings: dict[str, Any]) -> None:
        if self.tokenizer.eos_token_id is None:
            raise UserError(
                f"{task} generates text, and the tokenizer of {self.opened.name} has no EOS token to end it; "
                "set tokenizer.eos_token and save it again"
            )
        generated = normalize_gen_kwargs(dict(settings), self.max_gen_toks)["max_gen_toks"]
        if generated >= self.opened.positions:
            raise UserError(
                f"{task} generates up to {generated} tokens, and {self.opened.name} has positions for "
                f"{self.opened.positions}; leave it out"
            )

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **settings: Any) -> Any:
        # Without it a row would go on behind its EOS for as long as another row of its batch does.
        own = self.model.generation_config.eos_token_id
        more = own if isinstance(own, list) else [own]
        ends = sorted({self.tokenizer.eos_token_id, *more} - {None})
        return super()._model_generate(context, max_length, stop, eos_token_id=ends, **settings)


def _sampled(request: Any) -> bool:
    return request.request_type == "generate_until" and bool(request.args[1].get("do_sample"))


def _shown(arguments: Any) -> Any:
    """What a request is remembered by when it was cut: its text."""
    return tuple(arguments) if all(isinstance(part, str) for part in arguments) else arguments[0]


def _doing(requests: Sequence[Any]) -> str:
    """What progress calls these requests."""
    names = list(dict.fromkeys(request.task_name for request in requests))
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"

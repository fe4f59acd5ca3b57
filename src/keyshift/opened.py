"""A checkpoint opened to be asked: model, tokenizer, the token that begins a request, its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from keyshift.cache_report import load_config
from keyshift.checkpoint import load_strictly, tokenizer_of
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError, first_line, nearest

DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
POSITION_FIELDS = ("n_positions", "max_position_embeddings", "n_ctx")
DEFAULT_POSITIONS = 2048
"""What the harness takes for a model that does not say."""
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""What of a configuration may change without an answer changing (the weights' dtype is hashed by itself)."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint in memory.

    Attributes:
        name: the folder or hub name.
        start: id of the token that every request begins with; None where there is none to put.
        positions: tokens that fit.
    """

    name: str
    model: Any
    tokenizer: Any
    start: int | None
    positions: int

    @cached_property
    def fingerprint(self) -> str:
        """A hash of weights, configuration and tokenizer, as loaded."""
        return fingerprint(self.model, self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """The text's tokens behind exactly one start token, if there is one."""
        return with_start(self.tokenizer.encode(text, add_special_tokens=False), self.start)


def with_start(ids: list[int], start: int | None) -> list[int]:
    """``ids`` beginning with exactly one ``start``, whether or not they bring their own."""
    return ids if start is None or ids[:1] == [start] else [start, *ids]


def check_checkpoint(name: str) -> int:
    """Refuse before any long work what cannot be evaluated: reads configuration and tokenizer only.

    Returns: how many tokens fit.

    Raises:
        UserError: nothing there, no causal language model, no tokenizer or one without BOS and EOS, a
            tokenizer with more tokens than the model has embeddings.
    """
    config = load_config(os.path.expanduser(name))
    tokenizer = load_tokenizer(name)
    start_token(tokenizer, config)
    _check_vocabulary(name, tokenizer, config.get_text_config().vocab_size)
    return positions_of(config)


def check_placement(device: str, dtype: str) -> torch.device:
    """The device that is meant; "auto" is the GPU if there is one.

    Raises:
        UserError: an unknown dtype, or a device that this machine has not.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype={dtype!r} is not known; {nearest(dtype, DTYPES)}")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device={device!r} cannot be used: {first_line(error)}") from error
    return place


def open_checkpoint(name: str, device: str, dtype: str) -> Opened:
    """The checkpoint ``name`` on ``device``, in evaluation mode.

    Args:
        name: a folder or a hub name, of any causal language model that transformers knows.
        device: as torch spells it; "auto" is the GPU if there is one.
        dtype: one of `DTYPES`; "auto" is what the checkpoint was saved in.

    Raises:
        UserError: what `check_checkpoint` refuses; a damaged or incomplete checkpoint; an unknown device or
            dtype.
    """
    place = check_placement(device, dtype)
    config = load_config(os.path.expanduser(name))
    tokenizer = load_tokenizer(name)
    start = start_token(tokenizer, config)
    where = os.path.expanduser(name)
    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    try:
        model = load_strictly(
            AutoModelForCausalLM.from_pretrained,
            where,
            config=config,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            refused=("missing_keys", "mismatched_keys"),
        )
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"checkpoint {name} cannot be loaded: {first_line(error)}") from error
    _check_vocabulary(name, tokenizer, model.get_input_embeddings().num_embeddings)
    model = model.to(place).eval()
    return Opened(name, model, tokenizer, start, positions_of(config))


def load_tokenizer(name: str) -> Any:
    """The tokenizer beside a checkpoint.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    tokenizer = tokenizer_of(os.path.expanduser(name))
    if tokenizer is None:
        raise UserError(
            f"checkpoint {name} has no tokenizer; save the one that it was trained with beside its weights, "
            "tokenizer.save_pretrained(folder)"
        )
    return tokenizer


def start_token(tokenizer: Any, config: Any) -> int | None:
    """The token that every request begins with: BOS; for models of this package else EOS, since training
    begins every document with it; otherwise None, as for the models whose tokenizers have no BOS.

    Raises:
        UserError: neither BOS nor EOS.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has neither a BOS nor an EOS token, and a request "
            "without context has to begin with one; set tokenizer.eos_token and save it again"
        )
    if tokenizer.bos_token_id is not None:
        return int(tokenizer.bos_token_id)
    return int(tokenizer.eos_token_id) if isinstance(config, KeyshiftConfig) else None


def positions_of(config: Any) -> int:
    """How many tokens fit into the model."""
    text = config.get_text_config()
    known = (getattr(text, name, None) for name in POSITION_FIELDS)
    return next((int(value) for value in known if value is not None), DEFAULT_POSITIONS)


def fingerprint(model: Any, tokenizer: Any) -> str:
    """A hash of everything that an answer depends on: weights, configuration, tokenizer (None: tokens are
    asked about)."""
    content = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    settings = {key: value for key, value in model.config.to_dict().items() if key not in VOLATILE}
    content.update(json.dumps(settings, sort_keys=True, default=str).encode())
    if tokenizer is not None:
        content.update(_tokenizer_text(tokenizer).encode())
    return content.hexdigest()


def _tokenizer_text(tokenizer: Any) -> str:
    """What decides how a tokenizer splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    return json.dumps([rules, tokenizer.bos_token, tokenizer.eos_token])


def _check_vocabulary(name: str, tokenizer: Any, embeddings: int) -> None:
    if len(tokenizer) > embeddings:
        raise UserError(
            f"the tokenizer of {name} has {len(tokenizer):,} tokens and the model embeddings for "
            f"{embeddings:,}; pass the tokenizer that the model was trained with"
        )

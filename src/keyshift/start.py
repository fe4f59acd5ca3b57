"""What a run's model starts from: fresh weights, or a checkpoint that ``training.start_from`` names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from keyshift.cache_report import load_config
from keyshift.checkpoint import tokenizer_of
from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.recipe import Training


def configuration_at(start: str, fields: dict[str, Any], vocab_size: int) -> KeyshiftConfig:
    """The configuration of the checkpoint ``start``, which decides on everything.

    Args:
        fields: what the recipe says of the model; it may only agree.
        vocab_size: of the data's tokenizer; a model may have more rows than that.

    Raises:
        UserError: no such checkpoint, not one of ours, a field that differs, too small a vocabulary.
    """
    config = load_config(os.path.expanduser(start))
    if not isinstance(config, KeyshiftConfig):
        raise UserError(
            f"training.start_from={start!r} is a {config.model_type} model; keyshift convert makes a "
            "keyshift model of it"
        )
    for field, value in fields.items():
        if getattr(config, field) != value:
            raise UserError(
                f"{field}={value!r}, but the checkpoint of training.start_from={start!r} has "
                f"{field}={getattr(config, field)!r}; leave it out"
            )
    if vocab_size > config.vocab_size:
        raise UserError(
            f"the data's tokenizer has {vocab_size} tokens and the checkpoint of "
            f"training.start_from={start!r} {config.vocab_size}; set data.tokenizer to the checkpoint's own"
        )
    return config


def starting_model(config: KeyshiftConfig, training: Training, tokenizer: Path | None) -> KeyshiftForCausalLM:
    """A model of ``config`` with the weights that it starts from, float32.

    Args:
        tokenizer: the folder of the data's, if tokens are words.

    Raises:
        UserError: the checkpoint's tokenizer is another one, or its weights cannot be read.
    """
    if training.start_from is None:
        return KeyshiftForCausalLM(config)
    start = os.path.expanduser(training.start_from)
    check_tokenizer("training.start_from", start, tokenizer)
    model: KeyshiftForCausalLM = KeyshiftForCausalLM.from_pretrained(
        start, config=config, dtype=torch.float32
    )
    return model


def check_tokenizer(key: str, name: str, tokenizer: Path | None) -> None:
    """Raises `UserError` if the checkpoint ``name`` that ``key`` names has another tokenizer than the data.

    Args:
        tokenizer: the folder of the data's, if tokens are words.
    """
    own = tokenizer_of(name)
    if own is not None and tokenizer is not None:
        given = tokenizer_of(str(tokenizer))
        if own.get_vocab() != given.get_vocab():
            raise UserError(
                f"the data was tokenised with another tokenizer than that of {key}={name!r}; "
                f"set data.tokenizer={name!r}, or prepare the text with it"
            )

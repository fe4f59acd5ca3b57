"""The tokenizer of a corpus: trained on it or loaded, and the token that separates documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from keyshift.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKEN = "<|endoftext|>"


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``documents``, which are streamed. Deterministic.

    It has the 256 bytes, so that any text round-trips, and ``<|endoftext|>`` (id 0) as bos, eos and pad
    token. A small corpus can run out of pairs to merge before ``vocab_size`` tokens. Raises ``UserError``
    if ``vocab_size`` is below the 257 tokens that are always there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise UserError(f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SPECIAL_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL_TOKEN, eos_token=SPECIAL_TOKEN, pad_token=SPECIAL_TOKEN
    )


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the Hugging Face hub. Raises ``UserError`` if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # transformers lets through whatever went wrong, of any type
        raise UserError(
            f"tokenizer {str(name_or_path)!r} cannot be loaded ({first_line(error)}); "
            "pass a folder with tokenizer files, a model name on the hub, or none to train one"
        ) from error


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token put before each document: bos, else eos. Raises ``UserError`` if there is neither."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise UserError(
        f"tokenizer {tokenizer.name_or_path!r} has neither a bos nor an eos token to separate documents; "
        "pass one that has, or none to train one"
    )

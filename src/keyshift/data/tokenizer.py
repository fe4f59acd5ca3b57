"""The tokenizer of a corpus: trained on it or loaded, and the tokens that separate and end documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from keyshift.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKEN = "<|endoftext|>"
_BEGINNINGS = ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>")
_ENDS = ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", SPECIAL_TOKEN)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on ``documents``, which are streamed. Deterministic.

    It has the 256 bytes, so that any text round-trips, and ``<|endoftext|>`` (id 0) as bos, eos and pad
    token. Asked for special tokens it puts that before a text, as training data has it, so that engines which
    know nothing of this package prompt a model as it was trained. A small corpus can run out of pairs to
    merge before ``vocab_size`` tokens. Raises ``UserError`` if ``vocab_size`` is below the 257 tokens that
    are always there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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
    begun = f"{SPECIAL_TOKEN} $A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=begun,
        pair=f"{begun} $B:1",
        special_tokens=[(SPECIAL_TOKEN, tokenizer.token_to_id(SPECIAL_TOKEN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL_TOKEN, eos_token=SPECIAL_TOKEN, pad_token=SPECIAL_TOKEN
    )


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder, on the Hugging Face hub, or in a ``tokenizer.json`` alone.

    Such a file does not say which tokens begin and end a document; those with the usual names do.
    Raises ``UserError`` if it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        if Path(name_or_path).suffix == ".json" and Path(name_or_path).is_file():
            return _load_file(Path(name_or_path))
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
    except Exception as error:  # transformers lets through whatever went wrong, of any type
        raise UserError(
            f"tokenizer {str(name_or_path)!r} cannot be loaded ({first_line(error)}); "
            "pass a folder with tokenizer files, a tokenizer.json, a model name on the hub (without network "
            "only one that was fetched before), or none to train one"
        ) from error


def _load_file(path: Path) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if (path.parent / "tokenizer_config.json").exists() and path.name == "tokenizer.json":
        return PreTrainedTokenizerFast.from_pretrained(path.parent)
    tokenizer = Tokenizer.from_file(str(path))
    vocabulary = tokenizer.get_vocab()
    special = {
        name: next((token for token in usual if token in vocabulary), None)
        for name, usual in (("bos_token", _BEGINNINGS), ("eos_token", _ENDS))
    }
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, name_or_path=str(path), **special)


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token put before each document: bos, else eos. Raises ``UserError`` if there is neither."""
    return _first_of(tokenizer, tokenizer.bos_token_id, tokenizer.eos_token_id)


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token put after each document: eos, else bos. Raises ``UserError`` if there is neither."""
    return _first_of(tokenizer, tokenizer.eos_token_id, tokenizer.bos_token_id)


def _first_of(tokenizer: PreTrainedTokenizerBase, *ids: int | None) -> int:
    for token in ids:
        if token is not None:
            return token
    raise UserError(
        f"tokenizer {tokenizer.name_or_path!r} has neither a bos nor an eos token to separate documents; "
        "pass one that has, or none to train one"
    )


def tokenizer_fingerprint(folder: Path) -> str:
    """A hash of a saved tokenizer: the same for those that make the same tokens of the same text."""
    whole = folder / "tokenizer.json"
    files = [whole] if whole.exists() else sorted(folder.glob("*"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()

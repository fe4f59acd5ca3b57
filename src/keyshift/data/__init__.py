"""Real text for language modelling: files in, tokenised and packed streams out, document boundaries kept.

``prepare`` tokenises text files into a memory-mapped store and returns a ``TextData``; its two
``TokenStream``s hand out batches. Every step streams: memory is bounded by the longest single document (and,
while a tokenizer is trained, by the number of distinct words), not by the size of the corpus.
"""

from keyshift.data.documents import find_files, read_documents
from keyshift.data.store import TextData, prepare
from keyshift.data.stream import IGNORED_LABEL, TokenStream
from keyshift.data.tokenizer import SPECIAL_TOKEN, load_tokenizer, separator_id, train_tokenizer
from keyshift.data.writing import in_validation

__all__ = [
    "IGNORED_LABEL",
    "SPECIAL_TOKEN",
    "TextData",
    "TokenStream",
    "find_files",
    "in_validation",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "separator_id",
    "train_tokenizer",
]

"""Real text for language modelling: files in, tokenised and packed streams out, document boundaries kept.

``prepare`` tokenises files or a data set into a memory-mapped store and returns a ``TextData``; its two
``TokenStream``s hand out batches. A ``Mixture`` does so for several stores by weight, a ``StreamedText``
without any store. Every step streams: memory is bounded by the longest single document (with several workers,
by a few shards; while a tokenizer is trained, by the number of distinct words), not by that of the corpus.
"""

from keyshift.data.documents import find_files, read_documents
from keyshift.data.encoding import in_validation
from keyshift.data.hub import DatasetSource
from keyshift.data.mixture import Mixture
from keyshift.data.shards import MemoryShard
from keyshift.data.sources import FileSource
from keyshift.data.store import TextData, prepare
from keyshift.data.stream import IGNORED_LABEL, TokenStream
from keyshift.data.streaming import StreamedText
from keyshift.data.tokenizer import SPECIAL_TOKEN, load_tokenizer, separator_id, train_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "SPECIAL_TOKEN",
    "DatasetSource",
    "FileSource",
    "MemoryShard",
    "Mixture",
    "StreamedText",
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

"""Training: transformers' Trainer behind one function."""

from keyshift.training.checkpoints import newest_checkpoint, step_of
from keyshift.training.engine import TRACKERS, Outcome, check_before, train
from keyshift.training.processes import is_first, launched, uses_bfloat16
from keyshift.training.sources import (
    BatchSource,
    Corpus,
    MixedSource,
    StreamSource,
    TaskSource,
    TextSource,
)
from keyshift.training.watch import Progress

__all__ = [
    "TRACKERS",
    "BatchSource",
    "Corpus",
    "MixedSource",
    "Outcome",
    "Progress",
    "StreamSource",
    "TaskSource",
    "TextSource",
    "check_before",
    "is_first",
    "launched",
    "newest_checkpoint",
    "step_of",
    "train",
    "uses_bfloat16",
]

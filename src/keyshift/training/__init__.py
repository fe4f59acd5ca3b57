"""Training: transformers' Trainer behind one function."""

from keyshift.training.engine import Outcome, Progress, newest_checkpoint, train
from keyshift.training.sources import BatchSource, MixedSource, TaskSource, TextSource

__all__ = [
    "BatchSource",
    "MixedSource",
    "Outcome",
    "Progress",
    "TaskSource",
    "TextSource",
    "newest_checkpoint",
    "train",
]

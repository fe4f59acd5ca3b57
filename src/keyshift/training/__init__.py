"""Training: transformers' Trainer behind one function."""

from keyshift.training.engine import Outcome, Progress, newest_checkpoint, train
from keyshift.training.sources import BatchSource, TaskSource, TextSource

__all__ = ["BatchSource", "Outcome", "Progress", "TaskSource", "TextSource", "newest_checkpoint", "train"]

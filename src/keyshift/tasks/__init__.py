"""Synthetic tasks: each a dataclass of sizes with ``batch(seed, step, batch_size)``, a pure function."""

from keyshift.tasks.induction import Induction

TASKS = {"induction": Induction}

__all__ = ["TASKS", "Induction"]

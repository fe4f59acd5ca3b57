"""The implementations of `stream_attention`: which there are, which this machine has, which a call gets.

A backend is a module beside this one with four functions: ``run``, with the signature of `reference.run`;
``missing()``, why this machine cannot have it, or None; ``detail()``, what there is if it can; and
``refused(queries)``, why it cannot take tensors like these, or None. It is imported when first asked about.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from torch import Tensor

BACKENDS = ("cpu", "triton", "reference")
"""By name, the fastest first; "auto" takes the first that is there and takes these tensors."""


def module(name: str) -> ModuleType:
    return importlib.import_module(__name__.removesuffix("backends") + name)


def missing(name: str) -> str | None:
    """Why this machine does not have a backend, in one line; None if it does."""
    return module(name).missing()


def choose(name: str, queries: Tensor) -> Callable[..., Tensor]:
    """The function that computes a call.

    Raises:
        RuntimeError: the backend of that name is not on this machine.
        ValueError: it cannot take these tensors.
    """
    if name == "auto":
        for each in BACKENDS:
            found = module(each)
            if found.refused(queries) is None and found.missing() is None:
                return found.run
    found = module(name)
    if (reason := found.missing()) is not None:
        raise RuntimeError(f"backend={name!r} is not on this machine: {reason}")
    if (reason := found.refused(queries)) is not None:
        raise ValueError(f"backend={name!r} {reason}")
    return found.run

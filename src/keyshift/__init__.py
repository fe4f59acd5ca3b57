"""keyshift: attention mechanisms designed, trained, compared and served from caches of half the size.

Importing it is cheap: torch and transformers load when a name is first used. The model classes are
    registered with
transformers' Auto classes as soon as those are imported, by whichever side comes first.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from keyshift.cache import KeyshiftCache, cache_bytes, cache_bytes_per_token
    from keyshift.configuration import KeyshiftConfig
    from keyshift.errors import NonFiniteLoss, UserError
    from keyshift.modeling import KeyshiftForCausalLM, KeyshiftModel

__version__ = "0.1.0"

_EXPORTS = {
    "KeyshiftCache": "keyshift.cache",
    "KeyshiftConfig": "keyshift.configuration",
    "KeyshiftForCausalLM": "keyshift.modeling",
    "KeyshiftModel": "keyshift.modeling",
    "NonFiniteLoss": "keyshift.errors",
    "UserError": "keyshift.errors",
    "cache_bytes": "keyshift.cache",
    "cache_bytes_per_token": "keyshift.cache",
}

__all__ = [
    "KeyshiftCache",
    "KeyshiftConfig",
    "KeyshiftForCausalLM",
    "KeyshiftModel",
    "NonFiniteLoss",
    "UserError",
    "__version__",
    "cache_bytes",
    "cache_bytes_per_token",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'keyshift' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__


# Each module registers its classes at its own end, so that it does not matter which side is imported first.
@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register_config(_: ModuleType) -> None:
    importlib.import_module("keyshift.configuration")


@wrapt.when_imported("transformers.models.auto.modeling_auto")
@wrapt.when_imported("transformers.modeling_layers")
def _register_models(_: ModuleType) -> None:
    # transformers.modeling_layers, which our decoder needs, imports the Auto classes itself: if it is only
    # half imported now, the call that follows its own import is the one that registers.
    layers = sys.modules.get("transformers.modeling_layers")
    if layers is None or hasattr(layers, "GradientCheckpointingLayer"):
        importlib.import_module("keyshift.modeling")

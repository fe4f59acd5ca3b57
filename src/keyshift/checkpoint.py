"""Checkpoints in: safetensors, whole, ours, and fitting their configuration, or an error in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file, logging

from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError, first_line

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TRAINING_STATE = (
    *("optimizer*", "scheduler*", "scaler*", "rng_state*", "training_args.bin"),
    *("trainer_state.json", "keyshift_state.json"),
)
"""What a run goes on from, some of it pickles: only ``keyshift train`` reads it, from where it wrote it."""

PROBLEMS = ("missing_keys", "unexpected_keys", "mismatched_keys")
"""What transformers only warns of."""


def load_strictly(
    load: Callable[..., Any], name: Any, *args: Any, refused: Sequence[str] = PROBLEMS, **kwargs: Any
) -> Any:
    """Call transformers' ``from_pretrained`` and refuse what it only warns of. Nothing is unpickled.

    Args:
        load: the ``from_pretrained`` to call.
        name: folder or hub name; None builds from ``state_dict`` and ``config``, as there.
        refused: which of `PROBLEMS` are errors.
        args, kwargs: passed on; ``ignore_mismatched_sizes=True`` still lets misshapen weights through.

    Raises:
        UserError: a checkpoint of another model type, a damaged file, pickled weights, missing, unexpected or
            misshapen weights.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    problems = set(refused)
    if kwargs.pop("ignore_mismatched_sizes", False):
        problems.discard("mismatched_keys")
    if name is not None and kwargs.get("config") is None:
        _check_model_type(name)
    if kwargs.get("use_safetensors") is False:
        raise UserError("use_safetensors=False would unpickle, which can run code; leave it out")
    _refuse_pickled(name)
    kwargs["use_safetensors"] = True
    try:
        with errors_only():
            model, info = load(name, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"checkpoint {name} cannot be read: {first_line(error)}") from error
    for problem in PROBLEMS:
        if problem in problems and info[problem]:
            raise UserError(
                f"checkpoint {name} does not fit its configuration: {problem.replace('_', ' ')} "
                f"{sorted(map(str, info[problem]))[:3]}"
            )
    return (model, info) if wants_info else model


def _refuse_pickled(name: Any) -> None:
    """Say of a folder whose weights are pickles what transformers would say in many words."""
    folder = Path(name or "")
    if not name or not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    if pickled := pickled_weights(folder):
        raise UserError(f"checkpoint {name}: {pickled_reason(pickled[0])}")


def pickled_weights(folder: Path) -> list[str]:
    """Files that by their names are pickles, and not a training's state."""
    state = {path for pattern in TRAINING_STATE for path in folder.glob(pattern)}
    return sorted({path.name for pattern in PICKLES for path in folder.glob(pattern) if path not in state})


def pickled_reason(file: str) -> str:
    """Why a file is refused, and what would do."""
    return (
        f"{file} is a pickle, which can run code when it is loaded; save the model again with "
        "save_pretrained, which writes safetensors"
    )


@contextmanager
def errors_only() -> Iterator[None]:
    """Silence transformers' warnings: what it warns of here is an error of ours, in one line."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_model_type(name: Any) -> None:
    """Refuse another library's checkpoint, which would load as random weights."""
    content, _ = PreTrainedConfig.get_config_dict(name)
    if content.get("model_type") != KeyshiftConfig.model_type:
        raise UserError(
            f"checkpoint {name} has model_type={content.get('model_type')!r}, not "
            f"{KeyshiftConfig.model_type!r}; load it with transformers.AutoModelForCausalLM"
        )


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a folder or repository; None where it has none.

    Raises:
        UserError: it has one that cannot be read.
    """
    missing_is_none = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
    if not any(cached_file(name, file, **missing_is_none) for file in TOKENIZER_FILES):
        return None
    try:
        with errors_only():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UserError(f"the tokenizer of {name} cannot be read: {first_line(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"the tokenizer of {name} has no vocabulary: files of it are missing")
    return tokenizer

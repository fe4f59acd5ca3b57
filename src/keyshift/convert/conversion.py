"""A checkpoint made into another: what it takes, the work itself, and the proof that it computes the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from keyshift.cache_report import load_config
from keyshift.checkpoint import load_strictly
from keyshift.configuration import KeyshiftConfig
from keyshift.convert.architectures import BASE_MODEL, made_of, ours, theirs
from keyshift.convert.files import (
    Entry,
    Made,
    Weights,
    appearing,
    copy_others,
    fetched,
    read_headers,
    written,
)
from keyshift.errors import RunError, UserError
from keyshift.memory import free_memory

TOLERANCE = 1e-5
"""Largest difference of logits that counts as none, relative to the largest logit, in float32."""
COMPARED_TOKENS = 64
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """What a conversion reads and writes.

    Attributes:
        weights: of the source, by their headers.
        source, target: the configurations.
        made: what every weight of the result is made of, but for what is ``added``.
        added: weights that the source has nothing for.
        parameters: of the result.
    """

    weights: Weights
    source: PreTrainedConfig
    target: PreTrainedConfig
    made: Mapping[str, Made]
    added: Mapping[str, Tensor]
    parameters: int

    @property
    def dtype(self) -> torch.dtype:
        """That of the first weight, and so of what is added."""
        return DTYPES[next(iter(self.weights.entries.values())).dtype]

    def needs(self) -> dict[str, Any]:
        """Parameters, and bytes: of disk for the result, of memory while it is written, and for comparing
        logits afterwards."""
        used = {name for each in self.made.values() for name in each.sources}
        new = self.parameters - sum(_numel(self.weights.entries[name].shape) for name in used)
        added = new * self.dtype.itemsize
        return {
            "from": self.source.model_type,
            "to": self.target.model_type,
            "parameters": self.parameters,
            "added_parameters": new,
            "disk_bytes": sum(self.weights.sizes.values()) + added,
            "memory_bytes": max(self.weights.sizes.values()) + added,
            "compare_bytes": 4 * self.parameters,  # one after the other, in float32
        }


def plan(source: str, *, to: str = "keyshift", shift: str = "none") -> Plan:
    """Look at a checkpoint's configuration and headers, and say what the conversion would be.

    Args:
        source: a folder or a hub name.
        to: ``keyshift``; ``original`` (of a converted model, or what it fits); or an architecture by name.
        shift: ``kv``, ``k`` or ``v`` puts in KV shifting that does nothing yet, α = β = (1, 0).

    Raises:
        UserError: an architecture, a setting or a dtype that cannot be converted, pickled weights, tensors
            that are missing, not known or misshapen.
    """
    folder = fetched(source)
    config = load_config(str(folder))
    mine = ours(config)
    target = _shifted(mine, shift) if to == "keyshift" else theirs(mine, None if to == "original" else to)
    if to == "keyshift" and not Path(source).expanduser().is_dir():
        setattr(target, BASE_MODEL, source)
    if to != "keyshift" and shift != "none":
        raise UserError(f"--shift {shift} is for keyshift models; leave it out with --to {to}")
    weights = read_headers(folder)
    _check_dtypes(weights)
    names = [name for name in weights.entries if not _computed(name, target)]
    made = made_of(config, target, names)
    shapes, added = _checked(weights, made, target)
    return Plan(weights, config, target, made, added, sum(map(_numel, shapes)))


def convert(
    planned: Plan, destination: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> float | None:
    """Write the checkpoint; it appears in ``destination`` in one piece, once it was compared.

    Args:
        progress: called with bytes written and bytes in all.

    Returns:
        The largest difference of logits, relative to the largest logit, over random tokens in float32; None
        where such a model does not fit into the memory that is free.

    Raises:
        UserError: ``destination`` exists, or its disk is too small.
        RunError: the two models do not agree, or writing failed; nothing is left of it.
    """
    check_disk(planned.needs()["disk_bytes"], destination.expanduser())
    with appearing(destination) as unfinished:
        written(planned.weights, unfinished, planned.made, planned.added, progress)
        copy_others(planned.weights.folder, unfinished)
        planned.target.architectures = [_class_name(planned.target)]
        planned.target.save_pretrained(unfinished)
        difference = _difference(planned, unfinished)
        if difference is not None and not difference <= TOLERANCE:
            raise RunError(f"the converted model's logits differ by {difference:.1e}; nothing was written")
    return difference


def _shifted(config: KeyshiftConfig, shift: str) -> KeyshiftConfig:
    """The configuration with KV shifting at the identity."""
    if shift == "none":
        return config
    if config.shift != "none":
        raise UserError(f"--shift {shift}: the model has shift={config.shift!r} already; leave it out")
    if shift not in ("k", "v", "kv"):
        raise UserError(f"--shift {shift} is not known; use kv, k or v")
    return KeyshiftConfig(**{**config.to_dict(), "shift": shift, "shift_init": "identity"})


def _computed(name: str, target: PreTrainedConfig) -> bool:
    """Whether a tensor is left out: RoPE's angles in old files, an output layer tied to the embedding."""
    tied = target.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _checked(
    weights: Weights, made: Mapping[str, Made], target: PreTrainedConfig
) -> tuple[list[tuple[int, ...]], dict[str, Tensor]]:
    """Shapes of the result's weights, and the shift's weights, which may be new; every other one must come
    from the source, in its shape.

    Raises:
        UserError: tensors that are missing, not known or misshapen, the first few by name.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(target)
    tied = {"lm_head.weight"} if target.tie_word_embeddings else set()
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    shifts = {name for name in wanted if name.rsplit(".", 2)[-2].endswith("_shift")} - made.keys()
    absent = {name for each in made.values() for name in each.sources if name not in weights.entries}
    _refuse("missing", sorted((wanted.keys() - made.keys() - shifts) | absent), weights)
    _refuse("not known", sorted(made.keys() - wanted.keys()), weights)
    misshapen = [
        f"{name} {found} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in made and (found := _shape(made[name], weights.entries)) != list(shape)
    ]
    _refuse("misshapen", misshapen, weights)
    dtype = DTYPES[next(iter(weights.entries.values())).dtype]
    return [*wanted.values()], {name: _identity(wanted[name]).to(dtype) for name in sorted(shifts)}


def _shape(made: Made, entries: Mapping[str, Entry]) -> list[int] | str:
    """The shape of a tensor that is not made yet."""
    shapes = [entries[name].shape for name in made.sources]
    try:
        return list(made.make(*(torch.empty(shape, device="meta") for shape in shapes)).shape)
    except (RuntimeError, IndexError):  # whatever operation they do not fit
        return f"from {' and '.join(str(list(shape)) for shape in shapes)}"


def _identity(shape: tuple[int, ...]) -> Tensor:
    """Weights of a shift that passes every token on as it is."""
    weights = torch.zeros(shape)
    weights[:, 0] = 1.0
    return weights


def _refuse(what: str, names: list[str], weights: Weights) -> None:
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise UserError(f"{weights.folder}: weights {what}: {shown}")


def _check_dtypes(weights: Weights) -> None:
    for name, entry in weights.entries.items():
        if entry.dtype not in DTYPES:
            raise UserError(
                f"{weights.folder}: {name} is {entry.dtype}; quantised weights cannot be converted, pass the "
                f"checkpoint in one of {', '.join(DTYPES)}"
            )


def check_disk(needed: int, destination: Path) -> None:
    """Raises `UserError` where so many bytes are not free."""
    existing = next(parent for parent in destination.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"DST {str(destination)!r} needs {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free there"
        )


def _class_name(config: PreTrainedConfig) -> str:
    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(config)).__name__


def _difference(planned: Plan, folder: Path) -> float | None:
    """See `convert`."""
    if planned.needs()["compare_bytes"] > 0.8 * free_memory():
        return None
    generator = torch.Generator().manual_seed(0)
    tokens = min(COMPARED_TOKENS, planned.target.max_position_embeddings)
    ids = torch.randint(planned.target.vocab_size, (1, tokens), generator=generator)
    before, after = (_logits(each, ids) for each in (planned.weights.folder, folder))
    return float((after - before).abs().max() / before.abs().max())


@torch.inference_mode()
def _logits(folder: Path, ids: Tensor) -> Tensor:
    logging.disable_progress_bar()  # transformers draws one for every checkpoint
    load = AutoModelForCausalLM.from_pretrained
    model = load_strictly(load, str(folder), config=load_config(str(folder)), dtype=torch.float32)
    return model.eval()(ids, use_cache=False).logits


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())

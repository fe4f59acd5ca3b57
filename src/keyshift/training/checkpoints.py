"""Checkpoints of a run: whole or not there, of one process or of many, readable before they are needed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from keyshift.errors import UserError, first_line

STAGING = ".saving"
"""Where a checkpoint is written, before it is moved to its place."""
WEIGHTS = "model.safetensors"
OWN_STATE = "keyshift_state.json"
"""What transformers' Trainer does not know of: the clipper's statistics, steps left out, a stream's place."""
SHARDS = "optimizer"
"""The folder of an optimiser's state that is spread over processes, in PyTorch's own format."""


UNREADABLE = (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile)
"""What reading a damaged file raises."""


def newest_checkpoint(directory: Path) -> Path | None:
    """The ``checkpoint-N`` folder with the largest N, or None."""
    found = [path for path in directory.glob("checkpoint-*") if path.name.rsplit("-", 1)[1].isdigit()]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    """The N of a ``checkpoint-N``."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def publish(staged: Path, directory: Path) -> None:
    """Move a complete checkpoint into ``directory`` in one step; then older ones go.

    A folder on its way out is renamed first: half of one must not look like a checkpoint.
    """
    mode = (staged / "config.json").stat().st_mode
    for path in staged.rglob("*"):
        if path.is_file():
            path.chmod(mode)  # safetensors keeps weights to their owner
    fresh = directory / staged.name
    if fresh.exists():
        os.replace(fresh, _doomed(fresh))
    os.replace(staged, fresh)
    for old in directory.glob("checkpoint-*"):
        if old != fresh:
            os.replace(old, _doomed(old))
    clear_leftovers(directory)


def clear_leftovers(directory: Path) -> None:
    """Remove what a killed process left of its last save: nothing here is a checkpoint."""
    for leftover in (*directory.glob(".old-checkpoint-*"), directory / STAGING):
        shutil.rmtree(leftover, ignore_errors=True)


def _doomed(checkpoint: Path) -> Path:
    path = checkpoint.with_name(f".old-{checkpoint.name}")
    shutil.rmtree(path, ignore_errors=True)
    return path


def check_readable(checkpoint: Path) -> None:
    """Read every file that resuming needs: what is missing or damaged is named now, not halfway.

    Raises:
        UserError: the checkpoint is not whole.
    """
    try:
        for path in _weight_files(checkpoint):
            with safe_open(path, framework="pt") as weights:
                weights.keys()
        sharded = (checkpoint / SHARDS).is_dir()
        if sharded:
            _check_shards(checkpoint / SHARDS)
        for name in ("scheduler.pt", *(() if sharded else ("optimizer.pt",))):
            torch.load(checkpoint / name, map_location="cpu", weights_only=True)
        for path in checkpoint.glob("rng_state*.pth"):
            with zipfile.ZipFile(path) as content:  # as torch.save writes; it has objects of NumPy's
                content.testzip()
        for name in ("config.json", "trainer_state.json", OWN_STATE):
            json.loads((checkpoint / name).read_text())
    except (*UNREADABLE, SafetensorError) as error:
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({first_line(error)}); delete it to resume from the "
            "start"
        ) from error


def _check_shards(folder: Path) -> None:
    """Raises `ValueError` unless every file is as long as the state's description says."""
    from torch.distributed.checkpoint import FileSystemReader

    for place in FileSystemReader(folder).read_metadata().storage_data.values():
        path = folder / place.relative_path
        if path.stat().st_size < place.offset + place.length:
            raise ValueError(f"{path.name} is cut off")


def check_same_data(checkpoint: Path, fingerprint: str | None) -> None:
    """Raises `UserError` unless the checkpoint was trained on the data with this fingerprint."""
    before = json.loads((checkpoint / OWN_STATE).read_text()).get("data")
    if before != fingerprint:
        raise UserError(
            f"checkpoint {checkpoint} was trained on other text (the store or its tokenizer was made anew): "
            "what it learned would not fit; bring the old text back, or pass another --out"
        )


def _weight_files(checkpoint: Path) -> Iterator[Path]:
    """The files of the weights: one, or those that an index lists."""
    index = checkpoint / f"{WEIGHTS}.index.json"
    if not index.exists():
        yield checkpoint / WEIGHTS
        return
    for name in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        yield checkpoint / name


def load_weights_(model: nn.Module, checkpoint: Path) -> None:
    """Put the weights of a checkpoint into a model that is not sharded yet; tied ones are saved once."""
    from safetensors.torch import load_file

    for path in _weight_files(checkpoint):
        _, unexpected = model.load_state_dict(load_file(path), strict=False)
        if unexpected:
            raise UserError(f"checkpoint {checkpoint} is of another model: it has {unexpected[0]}")


def gathered_weights(model: Any) -> dict[str, Tensor]:
    """The whole weights of a sharded model: in the first process, empty in the others. All must call."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys:
            state.pop(name, None)
    return cast(dict[str, Tensor], state)


def save_shards(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Write the optimiser's state, every process its part. All must call."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    try:
        dcp.save(state, checkpoint_id=checkpoint / SHARDS)
    except CheckpointException as error:  # which is no Exception
        reasons = [first_line(each) for each, _ in error.failures.values()]
        raise OSError(reasons[0] if reasons else "a process could not write its part") from error


def load_shards_(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Read what `save_shards` wrote, by any number of processes. All must call."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=checkpoint / SHARDS)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])

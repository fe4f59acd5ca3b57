"""The files of a checkpoint: safetensors in one or several shards, read by their headers, written one by one.

Nothing is ever unpickled. A shard is in memory at a time, so that a checkpoint may be larger than memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from keyshift.checkpoint import TRAINING_STATE, pickled_reason, pickled_weights
from keyshift.errors import RunError, UserError, first_line

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NOT_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
"""What goes along: tokenizer, generation settings, licence."""


class Entry(NamedTuple):
    """A tensor of a checkpoint: where it is and what it is, without its content."""

    shard: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint folder, by their headers.

    Attributes:
        entries: by name.
        sizes: bytes of every shard.
    """

    folder: Path
    entries: Mapping[str, Entry]
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class Made:
    """What a tensor of the result is made of.

    Attributes:
        sources: names of tensors of the source.
        make: from them, in this order; by itself a tensor is taken as it is.
    """

    sources: tuple[str, ...]
    make: Callable[..., Tensor] = lambda tensor: tensor


def fetched(name: str) -> Path:
    """The folder of a checkpoint; one on the hub is downloaded: safetensors and what goes along, no code.

    Raises:
        UserError: neither a folder nor a repository that can be reached.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"SRC {name!r}: no such folder; pass a checkpoint folder or a hub name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", *NOT_WEIGHTS]))
    except Exception as error:  # whatever the hub or the network have to say
        raise UserError(
            f"SRC {name!r}: neither a folder here nor a model that the hub gives ({first_line(error)})"
        ) from error


def read_headers(folder: Path) -> Weights:
    """What tensors a checkpoint has.

    Raises:
        UserError: no safetensors (pickled weights are refused), a shard that is missing or damaged.
    """
    shards = _shards(folder)
    entries: dict[str, Entry] = {}
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="pt") as content:
                for name in content.keys():  # noqa: SIM118 - not a dict
                    part = content.get_slice(name)
                    entries[name] = Entry(shard, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / shard} cannot be read: {first_line(error)}") from error
    return Weights(folder, entries, {shard: (folder / shard).stat().st_size for shard in shards})


def _shards(folder: Path) -> list[str]:
    if (folder / INDEX).exists():
        try:
            shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{folder / INDEX} is no index of shards: {first_line(error)}") from error
        for shard in shards:
            if Path(shard).name != shard or not (folder / shard).exists():
                raise UserError(f"{folder / INDEX} names {shard!r}, which is not there")
        return shards
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    if pickled := pickled_weights(folder):
        raise UserError(f"{folder}: {pickled_reason(pickled[0])}")
    raise UserError(f"{folder} has neither {WEIGHTS} nor {INDEX}: no checkpoint of safetensors")


def written(
    weights: Weights,
    target: Path,
    made: Mapping[str, Made],
    added: Mapping[str, Tensor],
    progress: Callable[[int, int], None],
) -> None:
    """Write every tensor that is ``made`` to ``target``, and ``added`` into the last shard.

    Args:
        made: by name; each goes to the shard that its first source is in.
        progress: called with bytes written and bytes in all.
    """
    places: dict[str, str] = {}
    total, done = sum(weights.sizes.values()), 0
    last = [*weights.sizes][-1]
    for shard, tensors in _made(weights, made):
        tensors |= added if shard == last else {}
        save_file(tensors, target / shard, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, shard)
        done += weights.sizes[shard]
        progress(done, total)
    if set(places.values()) != {WEIGHTS}:
        size = sum((target / shard).stat().st_size for shard in set(places.values()))
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _made(weights: Weights, made: Mapping[str, Made]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Shard by shard, the tensors under their new names."""
    with ExitStack() as opened:
        contents = {
            shard: opened.enter_context(safe_open(weights.folder / shard, framework="pt"))
            for shard in weights.sizes
        }

        def tensor(name: str) -> Tensor:
            return contents[weights.entries[name].shard].get_tensor(name)

        for shard in weights.sizes:
            here = {
                new: each for new, each in made.items() if weights.entries[each.sources[0]].shard == shard
            }
            yield (
                shard,
                {new: each.make(*map(tensor, each.sources)).contiguous() for new, each in here.items()},
            )


def tensors_of(weights: Weights, made: Mapping[str, Made]) -> dict[str, Tensor]:
    """All tensors under their new names, in memory."""
    return {name: tensor for _, tensors in _made(weights, made) for name, tensor in tensors.items()}


def copy_others(source: Path, target: Path) -> None:
    """Tokenizer, generation settings and licence; not the configuration, nor where a training stood."""
    left = {"config.json", INDEX} | {path.name for each in TRAINING_STATE for path in source.glob(each)}
    for pattern in NOT_WEIGHTS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in left:
                shutil.copyfile(path, target / path.name)


def check_new(destination: Path) -> None:
    """Refuse a destination that exists: worth knowing before a source is downloaded.

    Raises:
        UserError: it does.
    """
    if destination.expanduser().exists():
        raise UserError(f"DST {str(destination)!r} exists; choose another folder, or remove it")


@contextmanager
def appearing(destination: Path) -> Iterator[Path]:
    """A folder to write a checkpoint to, which becomes ``destination`` at the end; after an error or an
    interruption nothing is left of it.

    Raises:
        UserError: ``destination`` exists.
        RunError: it cannot be written.
    """
    destination = destination.expanduser()
    check_new(destination)
    unfinished = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        unfinished.rename(destination)
    except OSError as error:
        raise RunError(f"DST {str(destination)!r} cannot be written: {first_line(error)}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

"""What of a checkpoint's folder goes to the hub: what inference needs, complete, and nothing pickled."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from keyshift.cache_report import load_config
from keyshift.checkpoint import PICKLES, TRAINING_STATE, pickled_reason, tokenizer_of
from keyshift.configuration import KeyshiftConfig
from keyshift.convert import plan
from keyshift.convert.files import INDEX, Weights
from keyshift.errors import UserError

PICKLED = (*PICKLES, "*.pkl", "*.pickle", "*.joblib")
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.model", "chat_template.*"),
)
RUNS = ("", "seed-*/", "runs/*/seed-*/")
"""Where checkpoints lie in folders that are none."""
NEEDED = ("config.json", "generation_config.json", *TOKENIZER, "README.md", "LICENSE*", "NOTICE*")
"""What goes, beside the weights."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint that may go.

    Attributes:
        files: names of what goes as it is, in the folder itself.
        left_out: names of what stays.
        warnings: what a reader would miss, in one line each.
    """

    folder: Path
    config: KeyshiftConfig
    parameters: int
    files: list[str]
    left_out: list[str]
    warnings: list[str]


def read_contents(folder: Path) -> Contents:
    """Look at a checkpoint: configuration, headers of the weights, first bytes of the rest.

    Raises:
        UserError: no folder, no configuration, another library's model; pickled files beside those of the
            training's own state; shards or weights that are missing, damaged, not known or misshapen; a
            tokenizer that cannot be read.
    """
    config = checked_config(folder)
    present = sorted(path.name for path in folder.iterdir())
    others = [name for name in present if not _matches(name, TRAINING_STATE)]
    _refuse_pickles(folder / name for name in others)
    planned = plan(str(folder))
    if planned.added:
        raise UserError(f"FOLDER {folder}: weights missing: {', '.join(list(planned.added)[:3])}")
    weights = _weight_files(planned.weights)
    files = [
        name for name in others if (name in weights or _matches(name, NEEDED)) and (folder / name).is_file()
    ]
    warnings = []
    if tokenizer_of(str(folder)) is None:
        warnings.append(
            "there is no tokenizer: who loads the model will need one, tokenizer.save_pretrained(FOLDER)"
        )
    return Contents(
        folder=folder,
        config=config,
        parameters=planned.needs()["parameters"],
        files=files,
        left_out=[name for name in present if name not in files],
        warnings=warnings,
    )


def checked_config(folder: Path) -> KeyshiftConfig:
    """The configuration of a keyshift checkpoint.

    Raises:
        UserError: no folder, no configuration in it, another library's, or one that contradicts itself.
    """
    if not folder.is_dir():
        raise UserError(f"FOLDER {str(folder)!r}: no such folder; pass the folder of a checkpoint")
    if not (folder / "config.json").is_file():
        inside = [path.parent for place in RUNS for path in folder.glob(f"{place}checkpoint-*/config.json")]
        hint = f"{inside[0]} has one" if inside else "pass the folder of a checkpoint"
        raise UserError(f"FOLDER {str(folder)!r} has no config.json; {hint}")
    config = load_config(str(folder))
    if not isinstance(config, KeyshiftConfig):
        raise UserError(
            f"FOLDER {str(folder)!r} has model_type={config.model_type!r}, not 'keyshift'; push it with "
            "transformers, or make it a keyshift model with keyshift convert"
        )
    return config


def _weight_files(weights: Weights) -> set[str]:
    sharded = (weights.folder / INDEX).exists()
    return {*weights.sizes, *([INDEX] if sharded else [])}


def _refuse_pickles(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_file() and (_matches(path.name, PICKLED) or _is_pickle(path)):
            raise UserError(f"FOLDER {str(path.parent)!r}: {pickled_reason(path.name)}")


def _is_pickle(path: Path) -> bool:
    """By content: a pickle's first bytes, or an archive with one in it, as torch.save writes."""
    with path.open("rb") as file:
        start = file.read(4)
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    return re.match(rb"\x80[\x02-\x05]", start) is not None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)

"""The text of a recipe: prepared from files or a data set, or opened where it was prepared before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import filelock

from keyshift.data import (
    DatasetSource,
    FileSource,
    Mixture,
    StreamedText,
    TextData,
    find_files,
    load_tokenizer,
    prepare,
)
from keyshift.data.sources import Source
from keyshift.errors import UserError
from keyshift.recipe import Recipe
from keyshift.recipe import TextData as Settings
from keyshift.training import Corpus


def text_of(
    recipe: Recipe,
    out: Path,
    *,
    keep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Corpus | None:
    """The text that a recipe trains on; None for a task alone.

    Raw text is tokenised into ``out``/data, once, whoever asks at the same time; what ``keyshift data
    prepare`` made is opened where it is.

    Args:
        keep: as `prepare` takes it: text that differs from what was prepared there is an error.
        progress: bytes read, and bytes to read.

    Raises:
        UserError: what `prepare` and its sources refuse, stores with unlike tokenizers, too little text for a
            batch.
    """
    settings = recipe.data
    if settings is None:
        return None
    opened = _prepared(settings)
    if opened is None and settings.stream:
        return StreamedText(
            _source(settings),
            cast(str, settings.tokenizer),  # the recipe was checked for it
            out / "data",
            validation_fraction=settings.validation_fraction,
        )
    largest = max(recipe.grid().values(), key=lambda v: v.training.batch_size * (v.sequence_length or 0))
    assert largest.sequence_length is not None
    rows, length = largest.training.batch_size, largest.sequence_length
    if opened is not None:
        _check_sizes(opened, rows, length)
        return opened
    with filelock.FileLock(_made(out) / ".data.lock"):
        return prepare(
            _source(settings),
            out / "data",
            tokenizer=settings.tokenizer,
            vocab_size=settings.vocab_size,
            sequence_length=length,
            batch_size=rows,
            validation_fraction=settings.validation_fraction,
            progress=progress,
            keep=keep,
        )


def reopen(recipe: Recipe, out: Path) -> Corpus | None:
    """What `text_of` gave, for a process that comes later."""
    if recipe.data is None:
        return None
    return _prepared(recipe.data) or TextData.open(out / "data")


def vocabulary_of(settings: Settings) -> int:
    """The size of the vocabulary that a recipe's text has, or will have once it is prepared."""
    opened = _prepared(settings)
    if opened is not None:
        return opened.vocab_size
    if settings.tokenizer is None:
        return settings.vocab_size
    tokenizer = load_tokenizer(settings.tokenizer)
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def _prepared(settings: Settings) -> TextData | Mixture | None:
    """The stores that a recipe names, opened."""
    if settings.mixture:
        names = {folder: Path(folder).name for folder in settings.mixture}
        if len(set(names.values())) < len(names):
            names = {folder: folder for folder in names}
        weights = {names[folder]: weight for folder, weight in settings.mixture.items()}
        return Mixture.open({name: folder for folder, name in names.items()}, weights)
    if len(settings.paths) == 1 and is_store(settings.paths[0]):
        store = TextData.open(settings.paths[0])
        _check_unused(settings, store)
        return store
    if stores := [path for path in settings.paths if is_store(path)]:
        raise UserError(
            f"data.paths has the prepared {stores[0]!r} beside others; give data.mixture the share of each"
        )
    return None


def _check_unused(settings: Settings, store: TextData) -> None:
    """Raises `UserError` for what a recipe wants of text that is prepared already, and otherwise."""
    if settings.stream:
        raise UserError(f"data.stream=true reads raw text; {settings.paths[0]} is prepared: leave it out")
    if settings.tokenizer is None:
        return
    if load_tokenizer(settings.tokenizer).get_vocab() != load_tokenizer(store.tokenizer_path).get_vocab():
        raise UserError(
            f"data.tokenizer={settings.tokenizer!r} is not the tokenizer of {settings.paths[0]}; "
            "leave it out, or prepare the text with it"
        )


def is_store(path: str | Path) -> bool:
    """Whether ``keyshift data prepare`` wrote this folder."""
    return (Path(path) / "meta.json").is_file() and (Path(path) / "tokenizer").is_dir()


def check_text(paths: Sequence[str | Path]) -> None:
    """Stores, or text that can be read, if any are named.

    Raises:
        UserError: what `keyshift.data.find_files` refuses of the others.
    """
    if text := [path for path in paths if not is_store(path)]:
        find_files(text)


def _source(settings: Settings) -> Source:
    if settings.dataset is not None:
        return DatasetSource(settings.dataset, settings.dataset_config, settings.split, settings.column)
    return FileSource(settings.paths, settings.column)


def _check_sizes(text: TextData | Mixture, rows: int, length: int) -> None:
    """Raises `UserError` for a store that does not fill one batch, or has nothing to validate on."""
    sides = {"train": text.train, **text.validations}
    for name, side in sides.items():
        needed = rows if name == "train" else 1
        if (windows := side.windows(length)) < needed:
            raise UserError(
                f"too little prepared text for {name}: {windows} windows of sequence_length {length}, and "
                f"{needed} are needed; lower batch_size or sequence_length, or prepare more text"
            )


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""``keyshift data``: text made ready for training, and looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import byte_progress, print_json
from keyshift.errors import UserError

if TYPE_CHECKING:
    from keyshift.data import DatasetSource, FileSource, TextData

data = typer.Typer(no_args_is_help=True, help="Prepare text for training: tokenised, checked, reusable.")
app.add_typer(data, name="data")


@data.command()
def prepare(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders or globs: .txt .md .jsonl .parquet, also .gz .bz2 .xz .zst."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead of paths: a data set, by hub name or folder.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="The data set's configuration, like sample-10BT.")
    ] = None,
    split: Annotated[str, typer.Option(help="The data set's split.")] = "train",
    column: Annotated[
        str, typer.Option(help="Where the text is, in JSON lines, parquet and data sets.")
    ] = "text",
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer: hub name, folder or tokenizer.json.")
    ] = None,
    train_tokenizer: Annotated[
        bool, typer.Option("--train-tokenizer", help="Train a byte-level BPE on the text instead.")
    ] = False,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the tokenizer to train.")] = 32_768,
    validation_fraction: Annotated[float, typer.Option(help="Documents held out, chosen by content.")] = 0.01,
    workers: Annotated[
        int | None, typer.Option(help="Processes that tokenise. Default: one per core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Tokenise text or a data set into a store; the same command goes on where it was stopped."""
    if train_tokenizer == (tokenizer is not None):
        raise UserError("pass either --tokenizer, or --train-tokenizer to train one on the text")
    source = _source(paths, dataset, config, split, column)
    import keyshift.data as text

    console = Console(stderr=as_json, highlight=False)
    there = out.exists()  # if it may stay, it is the store of this text
    with byte_progress(console) as progress:
        store = text.prepare(
            source,
            out,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            validation_fraction=validation_fraction,
            end_token=True,
            workers=_cores() if workers is None else workers,
            progress=progress,
            keep=True,
        )
    _print(store, out, as_json, console)
    if there:
        console.print("it was there already, of this text and these settings: nothing was read again")


@data.command()
def check(
    store: Annotated[Path, typer.Argument(help="A folder that keyshift data prepare made.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Compare every file of a store with its checksum, and say what is in it."""
    from keyshift.data import TextData

    console = Console(stderr=as_json, highlight=False)
    opened = TextData.open(store)
    with byte_progress(console) as progress:
        opened.verify(progress)
    _print(opened, store, as_json, console)
    console.print("every file is as it was written")


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _source(
    paths: list[str] | None, dataset: str | None, config: str | None, split: str, column: str
) -> FileSource | DatasetSource:
    from keyshift.data import DatasetSource, FileSource

    if (dataset is None) == (not paths):
        raise UserError("pass either PATH..., files and folders, or --dataset NAME")
    if dataset is not None:
        return DatasetSource(dataset, config, split, column)
    if config is not None:
        raise UserError(f"--config={config} is for --dataset NAME; leave it out")
    return FileSource(paths or [], column)


def _print(store: TextData, place: Path, as_json: bool, console: Console) -> None:
    summary: dict[str, Any] = {**store.summary(), "end_token": store.end_token, "store": str(place)}
    if as_json:
        print_json(summary)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("side", "documents", "tokens", "bytes"):
        table.add_column(heading, justify="left" if heading == "side" else "right")
    for side in ("train", "validation"):
        counts = summary[side]
        table.add_row(side, *(f"{counts[what]:,}" for what in ("documents", "tokens", "bytes")))
    console.print(table)
    console.print(f"vocabulary {store.vocab_size:,}, {summary['tokens_per_byte']:.3f} tokens per byte")
    console.print(f"store: {place}", soft_wrap=True)

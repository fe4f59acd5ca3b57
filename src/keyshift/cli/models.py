"""``keyshift cache`` and ``keyshift doctor``: what models need, and what this machine has."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import print_json
from keyshift.errors import UserError


@app.command()
def cache(
    model: Annotated[str, typer.Argument(help="A config.json, a checkpoint folder or a hub name.")],
    tokens: Annotated[str, typer.Option(help="Tokens per sequence; 32k is 32,768.")] = "4096",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, int8 or int4.")] = "bf16",
    memory: Annotated[
        str | None, typer.Option(help="Memory for caches, such as 80GB: how many sequences fit.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Cache bytes of every mechanism at a model's sizes: predicted, measured, and how many sequences fit."""
    from keyshift.cache_report import cache_rows, load_config, parse_memory, parse_tokens, print_cache

    if memory is not None and batch > 1:
        raise UserError(f"--memory={memory} asks how many sequences fit; leave out --batch={batch}")
    rows = cache_rows(
        load_config(model),
        tokens=parse_tokens(tokens),
        batch=batch,
        dtype=dtype,
        memory=None if memory is None else parse_memory(memory),
    )
    if as_json:
        print_json(rows)
    else:
        print_cache(rows, Console(highlight=False))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Which attention kernels this machine has, and why others are missing."""
    from keyshift.doctor import backend_rows, print_backends

    rows = backend_rows()
    if as_json:
        print_json(rows)
    else:
        print_backends(rows, Console(highlight=False))

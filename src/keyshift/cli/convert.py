"""``keyshift convert``: a checkpoint of another library as a keyshift model, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import byte_progress, print_json, size


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A checkpoint folder or hub name: llama, mistral, qwen2, qwen3."),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    shift: Annotated[
        str, typer.Option(help="Put in KV shifting that does nothing yet: kv, k or v.")
    ] = "none",
    to: Annotated[
        str, typer.Option(help="keyshift; original: back to where it came from; or an architecture.")
    ] = "keyshift",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would take and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Make a checkpoint into a keyshift model with the same logits, or a keyshift model into what it was."""
    from keyshift.convert import check_new, plan
    from keyshift.convert import convert as converted

    console = Console(stderr=as_json, highlight=False)
    check_new(destination)
    planned = plan(source, to=to, shift=shift)
    needs = planned.needs()
    if not as_json:
        console.print(*_lines(needs), sep="\n", soft_wrap=True)
    if dry_run:
        if as_json:
            print_json(needs)
        return
    with byte_progress(console) as progress:
        difference = converted(planned, destination, progress)
    if as_json:
        print_json({**needs, "checkpoint": str(destination), "logits_difference": difference})
        return
    console.print(_agreement(difference), f"checkpoint: {destination}", sep="\n", soft_wrap=True)


def _lines(needs: dict[str, Any]) -> list[str]:
    added = f", {needs['added_parameters']:,} of them new" if needs["added_parameters"] else ""
    return [
        f"{needs['from']} to {needs['to']}: {needs['parameters']:,} parameters{added}",
        f"disk {size(needs['disk_bytes'])}, memory {size(needs['memory_bytes'])} at a time, "
        f"{size(needs['compare_bytes'])} to compare logits",
    ]


def _agreement(difference: float | None) -> str:
    if difference is None:
        return "logits: not compared, two such models do not fit into the memory that is free"
    exact = "equal to the last bit" if difference == 0 else f"largest relative difference {difference:.1e}"
    return f"logits: {exact}, in float32 on random tokens"

"""``keyshift push``: a checkpoint to the Hugging Face hub, with a card and the code that loads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import size

if TYPE_CHECKING:
    from keyshift.hub import Upload


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a keyshift checkpoint.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Where to: NAME or OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="A branch of the repository. Default: main.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="For the card: eval.json of keyshift eval, or what its --json printed."),
    ] = None,
    remote_code: Annotated[
        bool,
        typer.Option(help="Put the model's code beside it, for those who load it without keyshift."),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would go, print the card and stop.")
    ] = False,
) -> None:
    """Upload a checkpoint to the Hugging Face hub: weights, tokenizer, a model card; never a pickle."""
    from keyshift.hub import plan_upload, upload

    console = Console(stderr=True, highlight=False)
    planned = plan_upload(folder, repo, results=results, remote_code=remote_code)
    for line in planned.contents.warnings:
        console.print(f"warning: {line}", markup=False, soft_wrap=True)
    if dry_run:
        typer.echo("\n".join(_listed(planned)))
        typer.echo(f"\n{planned.card}", nl=False)
        return
    where = upload(
        planned,
        private=private,
        revision=revision,
        say=lambda line: console.print(line, markup=False, soft_wrap=True),
    )
    typer.echo(where)


def _listed(planned: Upload) -> list[str]:
    sizes = planned.sizes()
    width = max(map(len, sizes))
    lines = [f"{name:<{width}} {size(count):>10}" for name, count in sizes.items()]
    lines.append(f"{len(sizes)} files, {size(sum(sizes.values()))}, to {planned.repo}")
    if planned.left_out:
        lines.append(f"not uploaded: {', '.join(planned.left_out)}")
    return lines

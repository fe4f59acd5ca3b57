"""``keyshift scaling``: loss against size, from comparisons that were run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import print_json


@app.command()
def scaling(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders that keyshift compare wrote, at several sizes.")
    ],
    out: Annotated[Path, typer.Option(help="Where scaling.json, scaling.html and figures go.")] = Path(
        "runs/scaling"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Fit a scaling law to every variant's loss: E + A N^-a, with intervals over seeds."""
    from keyshift.progress import stages
    from keyshift.scaling import fit_scaling, print_scaling, summary

    console = Console(stderr=as_json, highlight=False)
    with stages(console) as progress:
        report = fit_scaling(folders, out, progress)
    if as_json:
        print_json(summary(report))
    else:
        print_scaling(report, console)
    console.print(f"report: {out / 'scaling.html'}", soft_wrap=True)

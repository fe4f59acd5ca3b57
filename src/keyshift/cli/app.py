"""The command itself: its help, its version, its exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from keyshift import __version__
from keyshift.errors import RunError, UserError

app = typer.Typer(
    name="keyshift",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention mechanisms side by side: what each learns, and how much cache it keeps.",
)


def main() -> None:
    """Run the command line: exit code 2 for the user's mistakes, 1 for a failed run, 130 for an
    interruption."""
    try:
        app(standalone_mode=True)
    except (UserError, RunError) as error:
        if isinstance(error, RunError) or os.environ.get("RANK", "0") == "0":  # torchrun's all say the same
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass

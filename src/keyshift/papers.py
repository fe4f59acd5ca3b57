"""The papers' experiments that come with keyshift: what is claimed, and what this project measured of it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from keyshift.recipe import SMALL, builtin_recipes

FOLDER = "papers/"


@dataclass(frozen=True)
class Experiment:
    """A built-in recipe of the papers.

    Attributes:
        recipe: its name, for ``keyshift compare``.
        title: what it is about.
        paper: what the paper says about it.
        verdict: what came of it at small size; None if it was not measured.
        sizes: what ``--size`` takes.
        text: whether the command needs files of text.
    """

    recipe: str
    title: str
    paper: str
    verdict: str | None
    sizes: tuple[str, ...]
    text: bool


def experiments() -> list[Experiment]:
    """Every built-in recipe of the papers, by name."""
    found = []
    for name, path in builtin_recipes().items():
        if name.startswith(FOLDER):
            content = tomllib.loads(path.read_text(encoding="utf-8"))
            title, paper, verdict = content["title"], content["paper"], content.get("verdict")
            sizes = (SMALL, *content.get("sizes", {}))
            found.append(Experiment(name, title, paper, verdict, sizes, "data" in content))
    return found


def print_experiments(found: Sequence[Experiment], console: Console) -> None:
    """Of every experiment its name, the claim and the verdict."""
    for each in found:
        table = Table.grid(padding=(0, 1))
        table.add_row("  paper", each.paper)
        table.add_row("  here", each.verdict or "not measured")
        console.print(f"[bold]{each.recipe}[/bold]{' (text)' if each.text else ''}")
        console.print(table)
    console.print(
        "\nhere: at small size. Run one: keyshift compare RECIPE --jobs 2, with files of text if it says so"
    )

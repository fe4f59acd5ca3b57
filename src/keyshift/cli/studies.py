"""``keyshift circuits`` and ``keyshift theory``: what heads do, and what the theorems say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import print_json


@app.command()
def circuits(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A checkpoint folder, a hub name, or 'toy' for the circuit built by hand. "
            "Default: the trained models that come with keyshift."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where circuits.json and circuits.html go.")] = Path(
        "runs/circuits"
    ),
    period: Annotated[int, typer.Option(help="Random tokens per copy (n).")] = 50,
    repeats: Annotated[int, typer.Option(help="Copies per sequence.")] = 2,
    sequences: Annotated[int, typer.Option(help="Sequences.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    with_replacement: Annotated[
        bool, typer.Option("--with-replacement", help="Let a token occur twice in one copy.")
    ] = False,
    bos: Annotated[
        int | None, typer.Option(help="The first token's id, where the model does not say.")
    ] = None,
    convention: Annotated[
        str, typer.Option(help="Of the scores: paper, arena or transformer_lens.")
    ] = "paper",
    ablation: Annotated[
        str, typer.Option(help="What stands in for a head: mean, position_mean, zero or resample.")
    ] = "mean",
    fold_norms: Annotated[
        bool, typer.Option("--fold-norms/--raw-norms", help="Multiply norms' gains into the weights.")
    ] = True,
    text: Annotated[str | None, typer.Option(help="A prompt that repeats something.")] = None,
    heads: Annotated[
        list[str] | None, typer.Option("--head", help="Look at this head as an induction head: 1.6")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Find, measure and break the heads that complete repeats, in any causal language model."""
    from keyshift.circuits.command import analyse_models, toy_lines, toy_values
    from keyshift.circuits.report import print_circuits, summary
    from keyshift.circuits.study import Settings
    from keyshift.progress import stages

    console = Console(stderr=as_json, highlight=False)
    if model == "toy":
        print_json(toy_values()) if as_json else typer.echo("\n".join(toy_lines()))
        return
    settings = Settings(
        period=period,
        repeats=repeats,
        sequences=sequences,
        seed=seed,
        with_replacement=with_replacement,
        bos=bos,
        convention=convention,  # type: ignore[arg-type]  # checked by analyse
        method=ablation,  # type: ignore[arg-type]
        fold_norms=fold_norms,
        text=text,
        heads=tuple(heads or ()),
    )
    with stages(console) as progress:
        report = analyse_models(model, settings, out, progress)
    if as_json:
        print_json(summary(report))
    else:
        print_circuits(report, console)
    console.print(f"report: {out / 'circuits.html'}", soft_wrap=True)


@app.command()
def theory(
    out: Annotated[Path, typer.Option(help="Where theory.json, theory.html and figures go.")] = Path(
        "runs/theory"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Check every theorem of the papers numerically: what holds, and what needs a correction."""
    from keyshift.progress import stages
    from keyshift.theory.command import check_theory
    from keyshift.theory.report import print_theory, summary

    console = Console(stderr=as_json, highlight=False)
    with stages(console) as progress:
        report = check_theory(out, progress)
    if as_json:
        print_json(summary(report))
    else:
        print_theory(report, console)
    console.print(f"report: {out / 'theory.html'}", soft_wrap=True)

"""``keyshift compare`` and ``keyshift papers``: several models side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import Interruption, print_json, setting
from keyshift.errors import RunError, UserError


@app.command()
def compare(
    recipe: Annotated[str, typer.Argument(help="A recipe: induction, text, papers/depth, … or a TOML file.")],
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Text: files, folders or globs (.txt .md .jsonl .parquet)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where results go. Default runs/RECIPE or runs/SIZE/RECIPE.")
    ] = None,
    size: Annotated[
        str, typer.Option(help="Which of the recipe's sizes: small, or one that it has.")
    ] = "small",
    jobs: Annotated[int, typer.Option(help="Runs at a time, each in a process of its own.")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="Train every run in a job there instead: slurm, or local to try.")
    ] = None,
    cluster_settings: Annotated[
        list[str] | None, typer.Option("--cluster-set", help="What jobs ask for: slurm_partition=gpu")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Train every variant with so many seeds.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps per run.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Text: a tokenizer's folder or hub name.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Text: size of the tokenizer to train.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Override a recipe key: training.learning_rate=3e-4")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an earlier call stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Train several variants on one task or on your own text; write one report."""
    from keyshift.progress import follow
    from keyshift.recipe import load_recipe, results_folder

    for path in paths or []:
        if "=" in path and not Path(path).exists():
            raise UserError(f"PATH {path!r} is no file or folder; to override a key use --set {path}")
    overrides = {
        "seeds": seeds,
        "training.steps": steps,
        "data.paths": paths or None,
        "data.tokenizer": tokenizer,
        "data.vocab_size": vocab_size,
    }
    chosen = {key: value for key, value in overrides.items() if value is not None}
    loaded = load_recipe(recipe, {**chosen, **dict(setting(text) for text in settings or [])}, size)
    directory = out or results_folder(recipe, size)
    console = Console(stderr=as_json, highlight=False)
    stop = Interruption()
    from keyshift.cluster import Cluster
    from keyshift.compare import compare as run
    from keyshift.report import print_summary, summary_rows

    if cluster is None and cluster_settings:
        raise UserError(f"--cluster-set {cluster_settings[0]!r} needs --cluster slurm")
    asked = dict(setting(text, "--cluster-set", "timeout_min=60") for text in cluster_settings or [])
    where = None if cluster is None else Cluster(cluster, asked)
    with stop, follow(console, stop) as hooks:
        report = run(loaded, directory, resume=resume, jobs=jobs, cluster=where, hooks=hooks)
    if as_json:
        print_json(summary_rows(report))
    else:
        print_summary(report, console)
    console.print(f"report: {directory / 'report.html'}", soft_wrap=True)
    for variant in report.variants:
        for result in variant.runs:
            if result.status in ("diverged", "failed"):
                raise RunError(f"{variant.name}, seed {result.seed}: {result.message}")
    if not report.complete:
        console.print("stopped early; the same command with --resume goes on", soft_wrap=True)
        sys.exit(130)


@app.command()
def papers(as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False) -> None:
    """List the papers' experiments: what is claimed, and what this project measured of it."""
    from dataclasses import asdict

    from keyshift.papers import experiments, print_experiments

    found = experiments()
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        print_experiments(found, Console(highlight=False))

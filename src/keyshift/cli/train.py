"""``keyshift train``: one run of a recipe, on a laptop or under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import Interruption, print_json, setting
from keyshift.errors import RunError, UserError


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe: pretrain/base, pretrain/350m, … or a TOML file.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH|KEY=VALUE]...",
            help="Text (files, folders, or what keyshift data prepare wrote), and keys of the recipe to "
            "override: training.steps=100",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the run goes. Default runs/RECIPE or runs/SIZE/RECIPE.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="Which of the recipe's variants.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and of the order of data.")] = 0,
    size: Annotated[str, typer.Option(help="Which of the recipe's sizes.")] = "small",
    resume: Annotated[
        str | None, typer.Option(help="auto: go on from the newest checkpoint, if there is one.")
    ] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Log to this as well: tensorboard, trackio or wandb.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what it would take: parameters, memory, time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train one variant of a recipe: on one process, or on all that torchrun starts."""
    from keyshift.recipe import load_recipe, results_folder

    if resume not in (None, "auto"):
        raise UserError(f"--resume {resume!r} is not known; use --resume auto, with the run's --out")
    paths = [each for each in arguments or [] if "=" not in each or Path(each).exists()]
    overrides = dict(setting(each, "argument") for each in arguments or [] if each not in paths)
    if paths:
        overrides["data.paths"] = paths
    loaded = load_recipe(recipe, overrides, size, text_named=not dry_run)
    console = Console(stderr=as_json, highlight=False)
    if dry_run:
        from keyshift.corpus import check_text

        check_text(paths)
        _print_budgets(loaded, variant, console, as_json)
        return
    from keyshift.live import follow_one
    from keyshift.pretrain import pretrain
    from keyshift.training import is_first, newest_checkpoint

    speaking, stop = is_first(), Interruption()
    directory = out or results_folder(recipe, size)
    with stop, follow_one(console, stop, speaking=speaking) as watching:
        run, result = pretrain(
            loaded,
            directory,
            variant=variant,
            seed=seed,
            resume=resume == "auto",
            trackers=track or (),
            watching=watching,
        )
    if speaking:
        kept = newest_checkpoint(run.directory)
        summary = {
            "run": run.name,
            "checkpoint": None if kept is None else str(kept),
            **result.model_dump(mode="json"),
        }
        print_json(summary) if as_json else console.print(*_lines(summary), sep="\n", soft_wrap=True)
    if result.status == "diverged":
        raise RunError(f"{run.name}: {result.message}")
    if result.status == "interrupted":
        if speaking:
            console.print("stopped early; the same command with --resume auto goes on", soft_wrap=True)
        sys.exit(130)


def _print_budgets(recipe: Any, variant: str | None, console: Console, as_json: bool) -> None:
    from keyshift.pretrain import dry_run
    from keyshift.progress import stages
    from keyshift.training.budget import print_budget

    with stages(console) as progress:
        budgets = dry_run(recipe, variant, progress)
    print_json(budgets) if as_json else print_budget(budgets, console)


def _lines(summary: dict[str, Any]) -> list[str]:
    """How a run ended, for readers."""
    lines = [f"{summary['run']}: {summary['status']} after {summary['steps']} steps"]
    if summary["curve"]:
        last = summary["curve"][-1]
        facts = [f"held-out loss {last['loss']:.4f} nats per token"]
        if last["bits_per_byte"] is not None:
            facts.append(f"{last['bits_per_byte']:.4f} bits per byte")
        if last["accuracy"] is not None:
            facts.append(f"accuracy {last['accuracy']:.1%}")
        lines.append(", ".join(facts))
    if summary["train_tokens_per_second"]:
        lines.append(f"{summary['train_tokens_per_second']:,.0f} tokens/s in training")
    if summary["skipped"]:
        lines.append(f"{summary['skipped']} steps left out: a NaN, an infinity or a spike")
    return [*lines, f"checkpoint: {summary['checkpoint'] or 'none was saved'}"]

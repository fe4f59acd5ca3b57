"""The command line: parses, calls, prints. Everything slow is imported inside the commands."""

from __future__ import annotations

import signal
import sys
import tomllib
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

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
    from keyshift.recipe import SMALL, builtin_recipes, load_recipe

    overrides = {
        "seeds": seeds,
        "training.steps": steps,
        "data.paths": paths or None,
        "data.tokenizer": tokenizer,
        "data.vocab_size": vocab_size,
    }
    chosen = {key: value for key, value in overrides.items() if value is not None}
    loaded = load_recipe(recipe, {**chosen, **dict(_setting(text) for text in settings or [])}, size)
    name = recipe if recipe in builtin_recipes() else Path(recipe).stem
    directory = out or (Path("runs") if size == SMALL else Path("runs") / size) / name
    console = Console(stderr=as_json, highlight=False)
    stop = _Interruption()
    from keyshift.cluster import Cluster
    from keyshift.compare import compare as run
    from keyshift.report import print_summary, summary_rows

    if cluster is None and cluster_settings:
        raise UserError(f"--cluster-set {cluster_settings[0]!r} needs --cluster slurm")
    asked = dict(_setting(text, "--cluster-set", "timeout_min=60") for text in cluster_settings or [])
    where = None if cluster is None else Cluster(cluster, asked)
    with stop, follow(console, stop) as hooks:
        report = run(loaded, directory, resume=resume, jobs=jobs, cluster=where, hooks=hooks)
    if as_json:
        _print_json(summary_rows(report))
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
        _print_json(rows)
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
        _print_json(rows)
    else:
        print_backends(rows, Console(highlight=False))


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
        _print_json(toy_values()) if as_json else typer.echo("\n".join(toy_lines()))
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
        _print_json(summary(report))
    else:
        print_circuits(report, console)
    console.print(f"report: {out / 'circuits.html'}", soft_wrap=True)


@app.command()
def papers(as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False) -> None:
    """List the papers' experiments: what is claimed, and what this project measured of it."""
    from dataclasses import asdict

    from keyshift.papers import experiments, print_experiments

    found = experiments()
    if as_json:
        _print_json([asdict(each) for each in found])
    else:
        print_experiments(found, Console(highlight=False))


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
        _print_json(summary(report))
    else:
        print_theory(report, console)
    console.print(f"report: {out / 'theory.html'}", soft_wrap=True)


def _setting(
    text: str, option: str = "--set", example: str = "training.learning_rate=3e-4"
) -> tuple[str, Any]:
    """``key=value`` with a TOML value; what is not TOML is a string."""
    key, found, value = text.partition("=")
    if not found or not key.strip():
        raise UserError(f"{option} {text!r} must look like {example}")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _print_json(rows: Any) -> None:
    import json

    typer.echo(json.dumps(rows, indent=2))


class _Interruption:
    """Ctrl-C, SIGTERM or a closed terminal asks for an orderly stop; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> _Interruption:
        asking = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            asking.append(signal.SIGHUP)
        self.before = {sig: signal.signal(sig, self._handle) for sig in asking}
        return self

    def __exit__(self, *exception: object) -> None:
        for sig, handler in self.before.items():
            signal.signal(sig, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


if __name__ == "__main__":
    main()

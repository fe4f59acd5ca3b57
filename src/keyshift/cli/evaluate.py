"""``keyshift eval``: benchmarks, in-context learning and long contexts, for any causal language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyshift.cli.app import app
from keyshift.cli.options import print_json


@app.command("eval")
def evaluate(
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Checkpoint folders, hub names, NAME=CHECKPOINT,CHECKPOINT for seeds of one model, or the "
            "folder of a comparison.",
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="paper-gva, paper-kvshift, icl, passkey, repeated, or names of lm-evaluation-harness, with "
            "commas between."
        ),
    ],
    num_fewshot: Annotated[
        int | None, typer.Option(help="Examples in the prompt. Default: as each task says.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions per task, for a trial.")] = None,
    batch_size: Annotated[int, typer.Option(help="Requests in one call of the model.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, … auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16. auto: as the checkpoint was saved.")
    ] = "auto",
    data_root: Annotated[
        Path | None, typer.Option(help="A folder with copies of the benchmarks' data sets: no hub.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Held-out text for icl and repeated: files or a prepared store.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where eval.json, eval.md and all answers go.")] = Path(
        "runs/eval"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Score checkpoints on benchmarks: mean and interval over seeds, beside the papers' published rows."""
    from keyshift.evaluation.command import Request, evaluate_models
    from keyshift.evaluation.report import print_eval, summary
    from keyshift.evaluation.tasks import plan_tasks
    from keyshift.progress import stages

    console = Console(stderr=as_json, highlight=False)
    request = Request(
        tasks=tasks,
        shots=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        data_root=data_root,
        text=text,
        out=out,
    )
    with stages(console) as progress:
        report = evaluate_models(checkpoints, request, progress)
    if as_json:
        print_json(summary(report))
    else:
        print_eval(report, plan_tasks(tasks, num_fewshot).tables, console)
    console.print(f"report: {out / 'eval.md'}", soft_wrap=True)

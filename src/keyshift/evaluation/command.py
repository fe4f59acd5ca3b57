"""What ``keyshift eval`` does: see what is asked, open one checkpoint after the other, score, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keyshift.checkpoint import errors_only
from keyshift.errors import RunError, UserError
from keyshift.evaluation import in_context, passkey, repeated
from keyshift.evaluation.answers import Answers, key_of
from keyshift.evaluation.builtin import Measure, Settings
from keyshift.evaluation.models import Models, find_models
from keyshift.evaluation.report import write_eval
from keyshift.evaluation.results import EvalReport, Score
from keyshift.evaluation.tasks import Plan, plan_tasks
from keyshift.opened import Opened, check_checkpoint, check_placement, open_checkpoint
from keyshift.provenance import command_line, environment, moment

Progress = Callable[[str, int, int], None]

BUILT_IN: dict[str, tuple[Callable[[int, str], list[int]], Callable[..., list[Measure]]]] = {
    "icl": (in_context.lengths, in_context.in_context),
    "passkey": (passkey.lengths, passkey.passkey),
    "repeated": (repeated.lengths, repeated.repeated),
}
"""What a built-in task reads, in tokens, for so many positions; and how it is measured at one such length."""


@dataclass(frozen=True)
class Request:
    """The options of ``keyshift eval``, as its help describes them."""

    tasks: str
    shots: int | None
    limit: int | None
    batch_size: int
    device: str
    dtype: str
    data_root: Path | None
    text: Path | None
    out: Path


def evaluate_models(checkpoints: Sequence[str], request: Request, progress: Progress) -> EvalReport:
    """Score every checkpoint and write ``eval.json``, ``eval.md`` and, as they come, the answers.

    Everything that can be wrong with the arguments is found before a model is loaded.

    Raises:
        UserError: whatever is wrong with them, in one line.
        RunError: a disk that is full, or too little memory.
    """
    _check_numbers(request)
    check_placement(request.device, request.dtype)
    models = find_models(checkpoints)
    plan = plan_tasks(request.tasks, request.shots)
    settings = Settings(_absolute(request.text), request.limit, request.batch_size)
    for task in set(plan.built_in) & {"icl", "repeated"}:
        settings.text_for(task)
    with errors_only():
        for name in _all(models):
            positions = check_checkpoint(name)
            for task in plan.built_in:
                BUILT_IN[task][0](positions, name)
    benchmarks = _benchmarks(plan, request.data_root, progress) if plan.harness else None

    report = EvalReport(
        command=command_line(),
        created=moment(),
        environment=environment() | (_harness_version() if plan.harness else {}),
        settings=_plain(request),
        models=models.named,
        answers={},
        remarks=models.remarks,
        scores=[],
    )
    for model, names in models.named.items():
        for name in names:
            try:
                scores = _score(name, model, benchmarks, plan, settings, request, report, progress)
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"{name}: out of memory; run the same again with --batch-size below {request.batch_size}"
                ) from error
            # A task can be asked for twice, as a paper's and by name.
            report.scores += {(each.task, each.shots, each.metric): each for each in scores}.values()
    write_eval(report, plan.tables, request.out)
    return report


def _score(
    name: str,
    model: str,
    benchmarks: Any,
    plan: Plan,
    settings: Settings,
    request: Request,
    report: EvalReport,
    progress: Progress,
) -> list[Score]:
    """All scores of one checkpoint."""
    with errors_only():
        opened = open_checkpoint(name, request.device, request.dtype)
        with Answers(request.out / "answers", opened.fingerprint) as answers:
            report.answers[name] = answers.path.name
            told = partial(_told, progress, model)
            scores = []
            if benchmarks is not None:
                scores += benchmarks.score(opened, answers, model, request.batch_size, request.limit, told)
            for task in plan.built_in:
                scores += _built_in(task, opened, answers, model, settings, told)
    return scores


def _built_in(
    task: str, opened: Opened, answers: Answers, model: str, settings: Settings, progress: Progress
) -> Iterator[Score]:
    """A built-in task, its parts kept as answers."""
    lengths, measure = BUILT_IN[task]
    text = [] if task == "passkey" else settings.text_state()
    for length in lengths(opened.positions, opened.name):
        what = f"{task}, {length} tokens"
        key = key_of(task, length, settings.limit, opened.start, opened.positions, text)
        ask = partial(measure, opened, settings, length, partial(progress, what))
        for metric, value, questions in answers.once(key, ask):
            yield Score(
                model=model,
                checkpoint=opened.name,
                task=task,
                metric=metric,
                value=value,
                questions=questions,
            )


def _told(progress: Progress, model: str, what: str, done: int, total: int) -> None:
    progress(f"{model}: {what}", done, total)


def _benchmarks(plan: Plan, data_root: Path | None, progress: Progress) -> Any:
    try:
        import lm_eval
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        names = ", ".join(name for some in plan.harness.values() for name in some[:3])
        raise UserError(
            f"--tasks {names}: needs lm-evaluation-harness ({error}); pip install 'keyshift[eval]'"
        ) from error
    from keyshift.evaluation.benchmarks import Benchmarks

    return Benchmarks(plan, _absolute(data_root), progress)


def _check_numbers(request: Request) -> None:
    numbers = (
        ("limit", request.limit, 1),
        ("batch-size", request.batch_size, 1),
        ("num-fewshot", request.shots, 0),
    )
    for name, value, least in numbers:
        if value is not None and value < least:
            raise UserError(f"--{name}={value} must be at least {least}")
    if request.out.exists() and not request.out.is_dir():
        raise UserError(f"--out={request.out} is a file; pass a folder")


def _all(models: Models) -> Iterator[str]:
    return (name for names in models.named.values() for name in names)


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _plain(request: Request) -> dict[str, Any]:
    """The request as plain JSON values."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(request).items()}


def _harness_version() -> dict[str, str]:
    from importlib.metadata import version

    return {"lm-eval": version("lm-eval"), "datasets": version("datasets")}

"""Benchmarks by lm-evaluation-harness, as a library: its tasks, prompts and metrics."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from lm_eval.api import task as task_module
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from keyshift.checkpoint import errors_only
from keyshift.evaluation.answers import Answers
from keyshift.evaluation.harness_model import Model, Progress
from keyshift.evaluation.local_data import check_local, load_tasks
from keyshift.evaluation.results import SHARES, Score
from keyshift.evaluation.tasks import Plan, check_names
from keyshift.opened import Opened

SEED = 1234
"""The harness's own, of everything that tasks draw."""


class Benchmarks:
    """The harness's tasks, loaded once for all checkpoints.

    Raises:
        UserError: names that it does not know, data that is not there.
    """

    def __init__(self, plan: Plan, root: Path | None, progress: Progress):
        names = [name for some in plan.harness.values() for name in some]
        progress("reading data sets", 0, len(names))
        with quiet():
            self.manager = _manager()
            check_names(plan, self.manager.all_tasks)
            if root is not None:
                check_local(self.manager, names, root)
            self.loaded: dict[int | None, dict[str, Any]] = {}
            for shots, some in plan.harness.items():
                self.loaded[shots] = load_tasks(self.manager, some, root)
                done = sum(len(plan.harness[each]) for each in self.loaded)
                progress("reading data sets", done, len(names))
        for shots, loaded in self.loaded.items():
            for task in loaded["tasks"].values():
                _set_shots(task, shots)

    def score(
        self,
        opened: Opened,
        answers: Answers,
        model: str,
        batch_size: int,
        limit: int | None,
        progress: Progress,
    ) -> list[Score]:
        """All tasks for one checkpoint. Raises `UserError` for a task that its positions do not allow."""
        scores = []
        for loaded in self.loaded.values():
            with quiet():
                asked = Model(opened, answers, batch_size, progress)
                for task in loaded["tasks"].values():
                    task.set_fewshot_seed(seed=SEED)
                random.seed(0)
                np.random.seed(SEED)
                torch.manual_seed(SEED)
                found = evaluate(
                    lm=asked, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False
                )
            scores += list(_scores(found, asked, model, opened.name))
        return scores


@functools.cache
def _manager() -> Any:
    """The harness's index of tasks: reading it takes seconds."""
    return TaskManager()


def _set_shots(task: Any, shots: int | None) -> None:
    """Examples in the prompt, as the harness's own command sets them: a task's 0 is not overruled."""
    own = task.get_config("num_fewshot")
    if shots is None:
        if own is None:
            task.set_config(key="num_fewshot", value=0)
    elif own != 0:
        task.set_config(key="num_fewshot", value=shots)


def _scores(found: dict[str, Any], asked: Model, model: str, checkpoint: str) -> Iterator[Score]:
    """The harness's results as scores, groups after their tasks."""
    groups = found.get("group_subtasks", {})
    above = {child: group for group, children in groups.items() for child in children}
    for name, metrics in {**found["results"], **found.get("groups", {})}.items():
        below = _leaves(groups, name)
        questions = sum(found["n-samples"][leaf]["effective"] for leaf in below)
        shots = {found["n-shot"][leaf] for leaf in below}
        for key, value in metrics.items():
            if "," not in key or "_stderr," in key or not isinstance(value, int | float):
                continue
            metric, kind = key.split(",", 1)
            yield Score(
                model=model,
                checkpoint=checkpoint,
                task=name,
                part_of=above.get(name),
                shots=next(iter(shots)) if len(shots) == 1 else None,
                metric=metric if kind == "none" else f"{metric} ({kind})",
                value=float(value),
                error=_error(metric, float(value), questions),
                questions=questions,
                requests=sum(asked.requests[leaf] for leaf in below),
                truncated=sum(asked.truncated[leaf] for leaf in below),
            )


def _leaves(groups: dict[str, list[str]], name: str) -> list[str]:
    """The tasks below a group; a task itself."""
    if name not in groups:
        return [name]
    return [leaf for child in groups[name] for leaf in _leaves(groups, child)]


def _error(metric: str, value: float, questions: int) -> float | None:
    if metric not in SHARES or questions < 2 or not 0 <= value <= 1:
        return None
    return math.sqrt(value * (1 - value) / (questions - 1))


@contextmanager
def quiet() -> Iterator[None]:
    """No bars and no chatter of the harness and of datasets: our progress says how far it is."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    bars, shown = task_module.tqdm, datasets.is_progress_bar_enabled()
    task_module.tqdm = functools.partial(tqdm, disable=True)
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with errors_only():
            yield
    finally:
        task_module.tqdm = bars
        if shown:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)

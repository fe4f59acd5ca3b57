"""What ``--tasks`` may say: the papers' groups, built-in tasks, and every name of the harness."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from keyshift.errors import UserError
from keyshift.evaluation.paper_tables import PAPERS, PaperTable

BUILT_IN = ("icl", "passkey", "repeated")
EXAMPLES = "hellaswag, winogrande, openbookqa, arc_easy, arc_challenge, lambada_openai, mmlu, cmmlu"


@dataclass(frozen=True)
class Plan:
    """What is to be scored.

    Attributes:
        tables: of the papers that were asked for.
        built_in: names of `BUILT_IN`.
        harness: names of the harness, by the examples in their prompts (None: as each task says).
    """

    tables: tuple[PaperTable, ...]
    built_in: tuple[str, ...]
    harness: dict[int | None, list[str]]


def plan_tasks(names: str, shots: int | None) -> Plan:
    """What a list of names, separated by commas, asks for.

    Raises:
        UserError: no name, or ``shots`` for a paper's table, which has its own.
    """
    asked = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not asked:
        raise UserError(
            f"--tasks={names!r} names no task; pass {', '.join(PAPERS)} or names such as {EXAMPLES}"
        )
    papers = [name for name in asked if name in PAPERS]
    if papers and shots is not None:
        raise UserError(
            f"--num-fewshot={shots}: {papers[0]} has its own numbers of examples; name the tasks instead"
        )
    tables = tuple(table for name in papers for table in PAPERS[name])
    wanted = [(column.shots, column.task) for table in tables for column in table.columns]
    wanted += [(shots, name) for name in asked if name not in PAPERS and name not in BUILT_IN]
    harness: dict[int | None, list[str]] = {}
    for examples, task in dict.fromkeys(wanted):
        harness.setdefault(examples, []).append(task)
    return Plan(tables, tuple(name for name in asked if name in BUILT_IN), harness)


def check_names(plan: Plan, known: Sequence[str]) -> None:
    """Refuse names that the harness does not know, with the nearest that there are. Raises `UserError`."""
    for name in (name for names in plan.harness.values() for name in names):
        if name not in known:
            close = difflib.get_close_matches(name, [*PAPERS, *BUILT_IN, *known], n=3, cutoff=0.6)
            hint = f"did you mean {', '.join(close)}?" if close else f"some that are: {EXAMPLES}"
            raise UserError(f"--tasks: {name!r} is not a task; {hint}")

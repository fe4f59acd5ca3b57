"""The report as GitHub Markdown: for a page of documentation, an issue, a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from keyshift.report.cells import Cell, filled_columns
from keyshift.report.figures.canvas import Picture
from keyshift.report.numbers import reference_variant, summary_rows
from keyshift.report.paired import differences
from keyshift.report.sentences import lost, unfinished
from keyshift.report.tables import difference_lines, how_compared, results_remark, score_table
from keyshift.results import Report


def render_markdown(report: Report, pictures: Sequence[Picture] = (), figures: str = "figures/") -> str:
    """The report as text, which depends on nothing else; its ``pictures`` come last.

    Args:
        figures: stands before each picture's file name, ``NAME.png``.
    """
    parts = [*_head(report), *_results(report), *_differences(report), *_scores(report)]
    if pictures:
        parts.append("## Figures")
    for picture in pictures:
        alt = escaped(picture.alt)
        parts += [
            f"![{alt}]({figures}{picture.name}.png)",
            f"**{escaped(picture.title)}.** {escaped(picture.caption)}",
        ]
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """``text`` on one line, with nothing in it that Markdown or HTML would take for its own."""
    return re.sub(r"([\\`*_{}\[\]<>|#~$&])", r"\\\1", " ".join(text.split()))


def _head(report: Report) -> list[str]:
    parts = [f"# {escaped(report.title)}"]
    if claim := report.recipe.get("paper"):
        parts.append(f"> {escaped(claim)}")
    parts.append(f"```bash\n{report.command}\n```")
    if report.variants:
        parts.append(_extent(report))
    if not report.complete:
        parts.append(f"**Incomplete**: {unfinished(report) or 'not every run has ended'}.")
    if lines := lost(report):
        parts.append("\n".join(f"- {escaped(line)}" for line in lines))
    return parts


def _extent(report: Report) -> str:
    """How many variants, seeds and steps; when and on what."""
    seeds = max(len(variant.runs) for variant in report.variants)
    steps = max((run.steps for variant in report.variants for run in variant.runs), default=0)
    counts = ((len(report.variants), "variant"), (seeds, "seed"))
    grid = " × ".join(f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in counts)
    measured = ", ".join(f"{name} {escaped(value)}" for name, value in report.environment.items())
    return f"{grid}, up to {steps:,} steps. {report.created[:10]}, {measured}."


def _results(report: Report) -> list[str]:
    rows = summary_rows(report)
    columns = [column for column in filled_columns(report.kind, rows) if column.title]
    titles = [": ".join(filter(None, (column.group, column.title))) for column in columns]
    lines = [[escaped(row["variant"]), *(_joined(column.cell(row)) for column in columns)] for row in rows]
    note = "Mean ± sample standard deviation over finished seeds; of steps and speeds the median"
    reference = reference_variant(report)
    ratio = "" if reference is None else f". Ratio: cache relative to {escaped(reference.name)}"
    note = " ".join(filter(None, (f"{note}{ratio}.", escaped(results_remark(report, rows)))))
    return ["## Results", _table(["variant", *titles], lines), note]


def _differences(report: Report) -> list[str]:
    found = differences(report)
    if not found:
        return []
    titles = ["compared", "measure", "where", "difference", "95% interval", "pairs", "left out"]
    lines = [[escaped(text) for text in line] for line in difference_lines(found)]
    kept = [place for place in range(len(titles)) if any(line[place] for line in lines)]
    chosen = [[line[place] for place in kept] for line in lines]
    table = _table([titles[place] for place in kept], chosen, words=3 if 2 in kept else 2)
    return ["## Differences", table, how_compared(report, found)]


def _scores(report: Report) -> list[str]:
    scores = score_table(report, summary_rows(report))
    if scores is None:
        return []
    lines = [[escaped(variant), *map(_joined, cells)] for variant, cells in scores.lines]
    titles = ["variant", *map(escaped, scores.names)]
    return ["## Scores", _table(titles, lines), "Mean ± sample standard deviation over finished seeds."]


def _joined(cell: Cell) -> str:
    """A cell on one line: a deviation follows its mean, any other remark stands in brackets."""
    note = " ".join(cell.note.split("\n"))
    if not note:
        return cell.text
    return f"{cell.text} {note}" if note.startswith("±") else f"{cell.text} ({note})"


def _table(titles: Sequence[str], lines: Iterable[Sequence[str]], words: int = 1) -> str:
    """A table whose first ``words`` columns are words and the others numbers."""
    rule = ["---" if place < words else "---:" for place in range(len(titles))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *lines))

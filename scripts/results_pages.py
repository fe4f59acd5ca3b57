"""Pages of measured results: docs/results/NAME.json, a thinned report.json, as text and figures of NAME.md.

    python scripts/results_pages.py                               write every page anew
    python scripts/results_pages.py add RUN_FOLDER NAME [FIGURE …]   take over a report, then write its page

Of a page only what stands between its markers is written; what was seen goes between title and measurement.
A page is made if it is not there. The table of README.md beside the pages is made of the recipes' claims and
verdicts. Figures are those named, without names all that the report has. After that
they are those whose images are there, so deleting an image leaves it out.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Collection, Sequence
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

from keyshift.papers import experiments
from keyshift.report.figures import FIGURE_NAMES, Picture, draw_figures
from keyshift.report.markdown import escaped, render_markdown
from keyshift.results import Report

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
IMAGE_WIDTH = 720
IMAGE_COLOURS = 256
"""With fewer, the colours of small marks become those of their neighbours."""
DIGITS = 5
"""Significant digits of losses on the way; decimals of accuracies."""


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_subparsers(dest="command").add_parser("add")
    add.add_argument("run_folder", type=Path)
    add.add_argument("name")
    add.add_argument("figures", nargs="*", help=f"among {', '.join(FIGURE_NAMES)}")
    given = parser.parse_args(arguments)
    if given.command is None:
        for kept in sorted(results.glob("*.json")):
            write_page(kept, [figure for figure in FIGURE_NAMES if _image(kept, figure).exists()])
        write_index(results)
        return
    if unknown := set(given.figures) - set(FIGURE_NAMES):
        parser.error(f"{min(unknown)!r} is no figure; choose among {', '.join(FIGURE_NAMES)}")
    source = given.run_folder / "report.json"
    if not source.exists():
        parser.error(f"{source} is not there; give the folder of a comparison, runs/NAME")
    report = Report.model_validate_json(source.read_text())
    results.mkdir(parents=True, exist_ok=True)
    kept = results / f"{given.name}.json"
    kept.write_text(thin(report).model_dump_json(exclude_defaults=True) + "\n")
    write_page(kept, given.figures or FIGURE_NAMES)
    write_index(results)


def thin(report: Report) -> Report:
    """The report without training losses and speeds (machines are shared), and curves with few digits.

    What tables are made of stays as it is: the last evaluation of every run, and which evaluation was the
    first to reach an accuracy.
    """
    content = report.model_dump()
    for variant in content["variants"]:
        for run in variant["runs"]:
            run.update(train_loss=[], train_tokens_per_second=None, decode_ms_per_token=None)
            run["curve"] = [*map(_rounded, run["curve"][:-1]), *run["curve"][-1:]]
            run["induction"] = [(step, round(score, 4)) for step, score in run["induction"]]
            for each in run["shift_weights"]:
                each["weights"] = [[round(weight, 3) for weight in head] for head in each["weights"]]
    return Report.model_validate(content)


def write_page(kept: Path, figures: Collection[str]) -> None:
    """Write the page of a kept report, and the images of ``figures`` as far as it has them."""
    report = Report.model_validate_json(kept.read_text())
    pictures = [picture for picture in draw_figures(report) if picture.name in figures] if figures else []
    for figure in FIGURE_NAMES:
        _image(kept, figure).unlink(missing_ok=True)
    for picture in pictures:
        image = _image(kept, picture.name)
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(small(picture))
    page = kept.with_suffix(".md")
    title, text = render_markdown(report, pictures, f"images/{kept.stem}-").split("\n\n", 1)
    before = page.read_text() if page.exists() else f"{title}\n"
    page.write_text(embedded(before, kept.stem, text))


def write_index(results: Path) -> None:
    """Write the table of README.md: every page with a recipe's claim and verdict."""
    index = results / "README.md"
    lines = ["| experiment | the papers | here, at small size |", "|---|---|---|"]
    for each in experiments():
        page = results / f"{Path(each.recipe).name}.md"
        if page.exists():
            lines.append(
                f"| [{page.stem}]({page.name}) | {escaped(each.paper)} | {escaped(each.verdict or '')} |"
            )
    before = index.read_text() if index.exists() else "# Results\n"
    index.write_text(embedded(before, "index", "\n".join(lines) + "\n"))


def embedded(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the markers of ``name``, at its end if it has none."""
    first, last = f"<!-- measured: {name} -->", "<!-- /measured -->"
    block = f"{first}\n{text}{last}"
    found = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    return found.sub(lambda _: block, page) if found.search(page) else f"{page}\n{block}\n"


def small(picture: Picture) -> bytes:
    """The picture as a PNG for a page: no wider than there is room, with few colours."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture.png)).convert("RGB")
    size = (IMAGE_WIDTH, round(image.height * IMAGE_WIDTH / image.width))
    reduced = image.resize(size, Image.Resampling.LANCZOS).quantize(IMAGE_COLOURS, dither=Image.Dither.NONE)
    written = io.BytesIO()
    reduced.save(written, "png", optimize=True)
    return written.getvalue()


def _image(kept: Path, figure: str) -> Path:
    return kept.parent / "images" / f"{kept.stem}-{figure}.png"


def _rounded(point: dict[str, Any]) -> dict[str, Any]:
    """A point of a curve with few digits; its accuracy down, so that none that missed 99% comes to it."""
    losses = {name: point[name] for name in ("loss", "bits_per_byte") if point[name] is not None}
    few = {name: float(f"{value:.{DIGITS}g}") for name, value in losses.items()}
    if point["accuracy"] is not None:
        exact = Decimal(repr(point["accuracy"]))  # a product with a power of 10 could end below it
        few["accuracy"] = float(exact.quantize(Decimal(1).scaleb(-DIGITS), ROUND_FLOOR))
    return {**point, **few}


if __name__ == "__main__":
    main()

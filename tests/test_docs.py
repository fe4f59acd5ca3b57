"""The docs keep their word: examples run, commands work, links lead somewhere, no setting is left out."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from keyshift import cli, compare, runs
from keyshift.configuration import CHOICES, KeyshiftConfig
from keyshift.data import find_files
from keyshift.recipe import Engine, Recipe, TextData, Training
from keyshift.tasks import TASKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CHEAP_STEPS = 50
"""A documented comparison of a recipe from the same page with at most so many steps is really run."""

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class Fence(NamedTuple):
    """A fenced block: its language, the file it is to be saved as, its text."""

    language: str
    file: str | None
    text: str


def fences(page: Path) -> list[Fence]:
    found = re.findall(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Fence(language, file or None, text) for language, file, text in found]


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def section(page: str, heading: str) -> str:
    """What stands under a heading, up to the next one."""
    text = (ROOT / page).read_text()
    _, found, rest = text.partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str) -> dict[str, list[str]]:
    """The rows of the Markdown tables in ``text``: the names in the first cell, each with the other cells."""
    rows = {}
    for line in text.splitlines():
        first, *others = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|"):
            rows.update(dict.fromkeys(re.findall(r"`([^`]+)`", first), others))
    return rows


# Blocks and commands


@every_page
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order and in one folder, as a reader would: save files, run or check commands, execute Python."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (config,) = (block for block in fences(ROOT / "docs/caches.md") if block.file == "config.json")
    Path("path/to").mkdir(parents=True)
    Path("path/to/config.json").write_text(config.text)
    Path("runs/corpus/prose").mkdir(parents=True)  # in place of what scripts/corpus.py fetches
    stories = [json.dumps({"text": f"Story {n} is about {n * n % 97} tokens. " * 200}) for n in range(300)]
    Path("runs/corpus/prose/stories.jsonl").write_text("\n".join(stories))
    names: dict[str, object] = {"__name__": "__main__"}
    printed: dict[str, str] = {}
    last = ""
    for block in fences(page):
        shown, last = last, ""
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, str(page), "exec"), names)
            last = output.getvalue()
        elif block.language == "bash":
            for line in block.text.splitlines():
                printed[line] = check_command(line, monkeypatch)
            last = printed.get("keyshift circuits toy", "")
        elif block.language == "text" and block.text.startswith("mechanism "):
            assert block.text.strip() == printed["keyshift cache config.json"].strip()
        elif block.language == "text" and shown:
            assert_same_output(shown, block.text)
        else:
            assert block.language in ("text", "toml"), f"a block of {block.language} is not tested"


def assert_same_output(printed: str, documented: str) -> None:
    """The same words, and numbers that agree but for the rounding of another machine."""
    number = r"[-+]?\d+(?:\.\d+)?"
    assert re.sub(number, "#", printed).split() == re.sub(number, "#", documented).split()
    found, claimed = (list(map(float, re.findall(number, text))) for text in (printed, documented))
    assert found == pytest.approx(claimed, rel=2e-3, abs=0.011)


def check_command(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command that is cheap and check the others piece by piece; what it printed, if it ran."""
    program, *arguments = shlex.split(line)
    if program == "keyshift":
        return run_keyshift(arguments, monkeypatch)
    if program == "make":
        target, *variables = arguments
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target} in the Makefile"
        for variable in variables:
            name, _, value = variable.partition("=")
            assert f"$({name})" in makefile
            assert "/" not in value or (ROOT / value).exists()
    elif program == ".ci/run":
        assert os.access(ROOT / program, os.X_OK)
    elif program in ("python", ".venv/bin/python"):
        check_python(arguments)
    else:
        known = {"pip install .", "pip install 'keyshift[cluster]'", ".venv/bin/pre-commit install", *FETCH}
        assert line in known, f"{line!r} is documented and not tested"
        assert (ROOT / "pyproject.toml").exists()
        assert (ROOT / ".pre-commit-config.yaml").exists()
    return ""


def check_python(arguments: list[str]) -> None:
    """The script or the tests that are run, and the options, exist."""
    if arguments[:2] == ["-m", "pytest"]:
        assert (ROOT / arguments[2]).exists()
        assert arguments[3::2] == ["-k"]
        return
    script, *options = arguments
    sources = "".join(path.read_text() for path in (ROOT / script).parent.glob("*.py"))
    assert (ROOT / script).exists()
    assert all(option in sources for option in options if option.startswith("--"))


SHORT = [
    *("training.steps=2", "training.batch_size=2", "training.eval_batches=1", "engine.micro_batch_size=1"),
    "data.sequence_length=512",
]
"""What a documented training is cut to."""


def run_keyshift(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The command line in this process; a long comparison stops once its models were built."""
    steps = dict(itertools.pairwise(arguments)).get("--steps")
    if arguments[0] == "train":
        arguments = [*arguments, *SHORT]
    if arguments[:2] == ["eval", "runs/first"]:
        arguments = [*arguments, "--limit", "1"]
    real = arguments[0] != "compare" or (Path(arguments[1]).exists() and steps and int(steps) <= CHEAP_STEPS)
    output = io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", ["keyshift", *arguments])
        if not real:
            patch.setattr(compare, "compare", build_only)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
    assert stopped.value.code in (0, None) if real else stopped.value.code == "built", output.getvalue()
    return output.getvalue()


def build_only(recipe: Recipe, directory: Path, **options: object) -> None:
    """In place of `compare`: the recipe is sound down to its models."""
    for variant in recipe.grid().values():
        runs.config_of(variant, runs.Sizes(300, 32))
    sys.exit("built")


# The long commands, with the network


FETCH = ["apt-get download python3.11-doc", "dpkg-deb -x python3.11-doc_*.deb pydoc"]


@pytest.mark.slow
def test_the_documented_prose_is_there_and_is_compared(tmp_path: Path) -> None:
    """The commands of "On real prose" as they stand; only the training is shortened."""
    if shutil.which("apt-get") is None or subprocess.run(["apt-cache", "show", "python3.11-doc"]).returncode:
        pytest.skip("needs apt and the package python3.11-doc")
    (block,) = (b for b in fences(ROOT / "docs/compare.md") if b.text.startswith(FETCH[0]))
    *fetch, command = block.text.splitlines()
    assert fetch == FETCH
    subprocess.run(["bash", "-ec", "\n".join(fetch)], cwd=tmp_path, check=True)
    program, *arguments = shlex.split(command)
    assert (program, arguments[:2]) == ("keyshift", ["compare", "text"])
    files = find_files([tmp_path / arguments[-1]])
    assert len(files) == 497
    assert sum(file.stat().st_size for file in files) >= 10_000_000
    short = ["--steps", "2", "--seeds", "1", "--set", "training.eval_batches=1"]
    run = [sys.executable, "-m", "keyshift.cli", *arguments, *short]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/text/report.html").exists()


# Links and paths


@every_page
def test_links_and_images_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        assert not anchor or anchor in headings(file), target


@every_page
def test_paths_in_the_text_exist(page: Path) -> None:
    """Whatever looks like a path of the repository is one, but for the files a contributor is to write."""
    tops = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in re.findall(rf"`((?:{tops})/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists() or "yours" in path or path.startswith("runs/"), path


def test_the_readme_is_short_and_shows_both_commands_and_the_report() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 80
    assert "\nmake compare\nmake test\n" in text
    assert "](docs/images/report.png)" in text


def tree() -> Iterator[str]:
    """The paths in the tree of docs/architecture.md."""
    (block,) = (b for b in fences(ROOT / "docs/architecture.md") if b.text.startswith("src/keyshift/\n"))
    parents: list[str] = []
    for line in block.text.splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        yield "".join(parents)


def test_the_tree_is_the_source() -> None:
    shown = set(tree())
    for path in shown:
        assert (ROOT / path).exists(), path
        assert path.endswith("/") == (ROOT / path).is_dir(), path
    made = (".pyc", ".so")
    files = (
        path for path in (ROOT / "src/keyshift").rglob("*") if path.is_file() and path.suffix not in made
    )
    missing = {str(path.relative_to(ROOT)) for path in files} - shown
    assert not missing


# Names and defaults


def test_every_setting_of_the_model_is_documented_with_its_default() -> None:
    rows = table(section("docs/mechanisms.md", "## Every setting"))
    names = KeyshiftConfig.__annotations__.keys() - {"model_type"}
    fields = {name: getattr(KeyshiftConfig, name) for name in names}
    assert rows.keys() == fields.keys()
    for name, default in fields.items():
        if default is not None:
            shown = rows[name][0].strip("`").strip('"')
            assert shown == str(default), name


def test_every_choice_is_documented() -> None:
    text = (ROOT / "docs/mechanisms.md").read_text()
    choices = ((field, value) for field, values in CHOICES.items() for value in values)
    missing = [f"{field}={value}" for field, value in choices if f'"{value}"' not in text]
    assert not missing


@pytest.mark.parametrize(
    ("heading", "fields"),
    [
        ("## Top level", Recipe.model_fields),
        ("## `[data]`", TextData.model_fields),
        ("## `[training]`", Training.model_fields),
        ("## `[engine]`", Engine.model_fields),
    ],
)
def test_every_key_of_a_recipe_is_documented_with_its_default(heading: str, fields: dict) -> None:
    rows = table(section("docs/recipes.md", heading))
    assert rows.keys() == fields.keys()
    for name, field in fields.items():
        shown = rows[name][0].strip("`").strip('"')
        if field.is_required():
            assert shown == "required", name
        elif isinstance(field.default, str | int | float):
            assert shown == str(field.default), name


def test_every_key_of_a_task_is_documented_with_its_default() -> None:
    for name, task in TASKS.items():
        rows = table(section("docs/recipes.md", f'### `"{name}"`'))
        defaults = {field.name: str(field.default) for field in dataclasses.fields(task)}
        assert {key: cells[0] for key, cells in rows.items()} == defaults, name


@functools.cache
def options(command: str) -> set[str]:
    group = typer.main.get_command(cli.app)
    parameters = group.commands[command].params
    names = {name for each in parameters for name in (*each.opts, *each.secondary_opts)}
    return {name for name in names if name.startswith("--")} - {"--help"}


def test_every_option_is_documented() -> None:
    assert table(section("docs/compare.md", "## Options")).keys() == options("compare")
    assert table(section("docs/caches.md", "## The table for a model you have")).keys() == options("cache")
    assert table(section("docs/circuits.md", "## Options")).keys() - {"MODEL"} == options("circuits")
    assert table(section("docs/evaluate.md", "## Options")).keys() == options("eval")
    assert table(section("docs/decoding.md", "## Generating text")).keys() == options("generate")
    assert table(section("docs/convert.md", "## Options")).keys() == options("convert")
    assert table(section("docs/hub.md", "## Options")).keys() == options("push")
    assert table(section("docs/pretrain.md", "## Options")).keys() == options("train")

"""Recipes: the built-in ones are valid, overrides apply, mistakes are named with the nearest valid key."""

import contextlib
import copy
import json
import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyshift.configuration import KeyshiftConfig
from keyshift.errors import UserError
from keyshift.modeling import KeyshiftForCausalLM
from keyshift.recipe import (
    Recipe,
    Training,
    build_task,
    builtin_recipes,
    config_fields,
    load_recipe,
    parse_recipe,
)
from keyshift.runs import Sizes, Sources, config_of, parameters, plan
from keyshift.tasks import Examined

VALID = {"title": "t", "task": {"name": "induction"}, "variants": {"a": {"attention": "gqa"}}}
MIXED = {"paths": ["x"], "vocab_size": 300, "sequence_length": 32, "task_share": 0.5}


def reads_text(name: str) -> bool:
    return "data" in tomllib.loads(builtin_recipes()[name].read_text())


@pytest.mark.parametrize("name", sorted(builtin_recipes()))
def test_built_in_recipes_are_valid_down_to_their_models(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    KeyshiftConfig(**sizes, shift="kv").save_pretrained("shifted")  # the checkpoint that adopt is for
    KeyshiftConfig(**sizes, attention="gva").save_pretrained("gva")  # and those that heal is for
    KeyshiftForCausalLM(KeyshiftConfig(**sizes)).save_pretrained("source")
    recipe = load_recipe(name, {"data.paths": ["x.txt"]} if reads_text(name) else None)
    for variant in recipe.grid().values():
        config_of(variant, Sizes(300, 32))


def test_the_induction_recipe_holds_what_the_readme_promises():
    variants = load_recipe("induction").variants
    assert {
        (v.get("attention", "gqa"), v["num_hidden_layers"], v.get("shift", "none")) for v in variants.values()
    } == {
        ("gqa", 1, "none"),
        ("gqa", 2, "none"),
        ("gqa", 1, "kv"),
        ("gva", 1, "none"),
        ("gva", 1, "kv"),
    }


def test_overrides_reach_into_tables():
    recipe = load_recipe("induction", {"training.steps": 7, "task.vocab_size": 32, "model.mlp": "none"})
    assert (recipe.training.steps, build_task(recipe.task).vocab_size, recipe.model["mlp"]) == (7, 32, "none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sedes": 2}, "sedes is not known; did you mean 'seeds'"),
        (
            {"training": {"lerning_rate": 1e-3}},
            "training.lerning_rate is not known; did you mean 'learning_rate'",
        ),
        ({"training": {"steps": "many"}}, "training.steps='many'"),
        ({"training": {"steps": 0}}, "training.steps=0"),
        ({"model": {"hidden_sise": 8}}, "model.hidden_sise is not known; did you mean 'hidden_size'"),
        (
            {"variants": {"a": {"atention": "gqa"}}},
            "variants.a.atention is not known; did you mean 'attention'",
        ),
        ({"variants": {}}, "variants"),
        ({"task": {"name": "inductoin"}}, "did you mean 'induction'"),
        ({"task": {"name": "induction", "vocab": 3}}, "task.vocab is not known; did you mean 'vocab_size'"),
        ({"task": {"name": "induction", "vocab_size": "big"}}, "must be an integer"),
        ({"data": {"paths": ["x"]}}, "trains on a task and reads no text"),
        ({"data": {"paths": ["x"], "vocab_size": 300}}, "exactly one of the tables"),
        ({"data": {"paths": ["x"], "task_share": 1.0}}, "data.task_share=1.0"),
        ({"data": {"task_share": 0.5}}, "no text to read"),
        ({"data": {"paths": ["x"], "task_share": 0.999}}, "data.task_share=0.999 of training.batch_size=64"),
        ({"data": {"paths": ["x"], "task_share": 0.001}}, "rows leaves none for the task"),
        ({"task": None, "data": {"paths": ["x"], "task_share": 0.5}}, "needs a [task] to mix with the text"),
        ({"task": None}, "exactly one of the tables"),
        ({"task": None, "data": {}}, "no text to read"),
        ({"training": {"learning_rate": math.inf}}, "training.learning_rate=inf: input should be a finite"),
        ({"training": {"max_grad_norm": math.nan}}, "training.max_grad_norm=nan"),
        (
            {"task": None, "data": {"paths": ["x"]}, "training": {"until_accuracy": 0.9}},
            "training.until_accuracy=0.9 needs a [task]",
        ),
        ({"task": {"name": "induction", "vocab_size": True}}, "task.vocab_size=True must be an integer"),
        ({"task": {"name": ["induction"]}}, "task.name=['induction'] is not known"),
        (
            {"data": {**MIXED, "tokenizer": "somewhere"}, "task": {"name": "repeated", "longets": 3}},
            "task.longets is not known; did you mean 'longest'",
        ),
    ],
)
def test_mistakes_are_named_with_a_way_out(change, message):
    with pytest.raises(UserError) as caught:
        parse_recipe({**VALID, **change}, "my.toml")
    assert message in str(caught.value)
    assert "my.toml" in str(caught.value) or "task." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_mixed_with_text_takes_its_sizes_from_the_text():
    assert parse_recipe({**VALID, "data": MIXED}, "r").task == {"name": "induction"}
    agreeing = {"name": "repeated", "vocab_size": 300, "sequence_length": 32}
    parse_recipe({**VALID, "data": MIXED, "task": agreeing}, "r")
    task = build_task({"name": "repeated"}, vocab_size=300, sequence_length=32)
    assert (task.vocab_size, task.sequence_length) == (300, 32)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"vocab_size": 299}, "task.vocab_size=299 contradicts the text's vocab_size=300; leave it out"),
        ({"sequence_length": 64}, "task.sequence_length=64 contradicts the text's sequence_length=32"),
        ({"longest": 30}, "task longest=30"),
        ({"name": "igsm"}, "task.name='igsm' has a vocab_size of its own and cannot be mixed with text"),
        ({"longets": 30}, "task.longets is not known; did you mean 'longest'"),
    ],
)
def test_a_task_that_does_not_fit_its_text_is_refused(task, message):
    with pytest.raises(UserError) as caught:
        parse_recipe({**VALID, "data": MIXED, "task": {"name": "repeated", **task}}, "r")
    assert message in str(caught.value)


def test_a_missing_recipe_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="did you mean 'induction'"):
        load_recipe("inducton")
    broken = tmp_path / "broken.toml"
    broken.write_text("title = ")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(str(broken))


def test_contradicting_settings_name_the_variant():
    recipe = parse_recipe({**VALID, "variants": {"odd": {"attention": "mqa", "num_key_value_heads": 2}}}, "r")
    with pytest.raises(UserError, match="variant 'odd': attention='mqa'"):
        config_of(recipe.grid()["odd"], Sizes(8, 16))
    short = parse_recipe({**VALID, "model": {"max_position_embeddings": 8}}, "r")
    with pytest.raises(UserError, match="max_position_embeddings=8 is below sequence_length=16"):
        config_of(short.grid()["a"], Sizes(8, 16))


def test_the_three_axes_are_recipe_fields():
    assert {"attention", "position", "shift", "hidden_size", "rope_theta"} <= set(config_fields())


GRID = {
    **VALID,
    "variants": {"plain": {}, "shifted": {"shift": "kv", "training": {"steps": 7}}},
    "axes": {
        "width": {"8": {"hidden_size": 8}, "16": {"hidden_size": 16, "training": {"batch_size": 2}}},
        "rate": {"low": {"training": {"learning_rate": 1e-4}}, "high": {"task": {"sequence_length": 100}}},
    },
}


def test_axes_make_every_combination_with_their_settings_on_top():
    grid = parse_recipe(GRID, "r").grid()
    assert len(grid) == 8
    cell = grid["shifted, width 16, low"]
    assert cell.labels == {"variant": "shifted", "width": "16", "rate": "low"}
    assert cell.model == {"shift": "kv", "hidden_size": 16}
    training = cell.training
    assert (training.steps, training.batch_size, training.learning_rate) == (7, 2, 1e-4)
    assert build_task(grid["plain, width 8, high"].task).sequence_length == 100
    assert grid["plain, width 8, low"].training == parse_recipe(VALID, "r").training.model_copy(
        update={"learning_rate": 1e-4}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"axes": {"w": {"8": {"hidden_sise": 8}}}},
            "axes.w.8.hidden_sise is not known; did you mean 'hidden_size'",
        ),
        (
            {"variants": {"a": {"training": {"stpes": 3}}}},
            "training.stpes is not known; did you mean 'steps'",
        ),
        ({"variants": {"a": {"training": {"steps": 0}}}}, "training.steps=0"),
        ({"variants": {"a": {"task": {"vocab": 3}}}}, "task.vocab is not known"),
        ({"comparisons": [{"of": "plain", "against": "shiftd"}]}, "'shiftd', which 'variant' does not have"),
        (
            {"comparisons": [{"of": "8", "against": "16", "axis": "with"}]},
            "comparisons.axis='with' is not an axis",
        ),
        (
            {"comparisons": [{"of": "plain", "against": "shifted", "metrik": "loss"}]},
            "metrik is not known; did you mean 'metric'",
        ),
        ({"axes": {"variant": {"x": {}}}}, "axes.variant is the table [variants]; use another name"),
        ({"axes": {"width": {}}}, "axes.width has no labels"),
        (
            {"variants": {"a": {}, "a, b": {}}, "axes": {"x": {"b, c": {}, "c": {}}}},
            "two combinations of labels are called 'a, b, c'",
        ),
        ({"equal_parameters": "plian"}, "equal_parameters='plian' is not a variant; did you mean 'plain'"),
        (
            {"variants": {"a b": {"training": {"until_accuracy": 0.9}}}},
            'variants."a b".training.until_accuracy=0.9 is the same for all',
        ),
        (
            {"axes": {"goal": {"0.9": {"training": {"until_accuracy": 0.9}}}}},
            'axes.goal."0.9".training.until_accuracy=0.9 is the same for all',
        ),
        (
            {"variants": {"a": {"data": {"sequence_length": 9}}}},
            "variants.a.data={'sequence_length': 9} changes the table [data], which the recipe does not have",
        ),
        (
            {"task": None, "data": {"paths": ["x"]}},
            "axes.rate.high.task={'sequence_length': 100} changes the table [task], which the recipe does",
        ),
        ({"variants": {"a": {"training": {"learning_rate": math.inf}}}}, "training.learning_rate=inf"),
    ],
)
def test_mistakes_in_a_grid_are_named(change, message):
    with pytest.raises(UserError) as caught:
        parse_recipe({**GRID, **change}, "my.toml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_the_length_of_text_differs_between_variants():
    text = {"task": None, "data": {"paths": ["x"]}}
    longer = parse_recipe({**VALID, **text, "variants": {"a": {"data": {"sequence_length": 9}}}}, "r")
    assert longer.grid()["a"].sequence_length == 9
    with pytest.raises(UserError, match="vocab_size is the same for all"):
        parse_recipe({**VALID, **text, "variants": {"a": {"data": {"vocab_size": 300}}}}, "r")
    for length in (1, "long", [9]):
        with pytest.raises(UserError, match=r"variant 'a': data\.sequence_length="):
            parse_recipe({**VALID, **text, "variants": {"a": {"data": {"sequence_length": length}}}}, "r")


def test_a_size_is_what_differs_from_the_file(tmp_path):
    path = tmp_path / "sized.toml"
    path.write_text(
        """
        title = "t"
        task = { name = "induction", vocab_size = 16 }
        variants = { a = { hidden_size = 8, num_hidden_layers = 1 } }
        [sizes.large]
        seeds = 7
        task = { vocab_size = 99 }
        variants = { a = { hidden_size = 64 } }
        """
    )
    small, large = load_recipe(str(path)), load_recipe(str(path), size="large")
    assert (small.seeds, large.seeds) == (3, 7)
    assert (small.task["vocab_size"], large.task) == (16, {"name": "induction", "vocab_size": 99})
    assert large.variants == {"a": {"hidden_size": 64, "num_hidden_layers": 1}}
    assert load_recipe(str(path), {"seeds": 1}, size="large").seeds == 1
    with pytest.raises(UserError, match=r"size='lage' is not known .* did you mean 'large'"):
        load_recipe(str(path), size="lage")


@pytest.mark.parametrize("name", [name for name in sorted(builtin_recipes()) if name.startswith("papers/")])
def test_the_papers_recipes_have_three_sizes_and_models_that_fit_each(name):
    for size in ("small", "quick", "paper"):
        recipe = load_recipe(name, {"data.paths": ["x.txt"]} if reads_text(name) else None, size=size)
        assert recipe.paper
        assert recipe.comparisons
        for variant in recipe.grid().values():
            length = variant.sequence_length or build_task(variant.task).sequence_length
            config_of(variant, Sizes(300, length))
        assert recipe.seeds >= (3 if size == "small" else 1)


def test_equal_parameters_widens_or_narrows_the_feed_forward_layer(tmp_path):
    variants = {
        "a": {},
        "b": {"attention": "mla", "position": "decoupled_rope"},
        "c": {"num_hidden_layers": 2},
    }
    model = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    recipe = parse_recipe(
        {**VALID, "model": model, "variants": variants, "axes": {"x": {"1": {}, "2": {"hidden_size": 64}}}},
        "r",
    )
    equal = recipe.model_copy(update={"equal_parameters": "a"})
    for cell in ("1", "2"):
        sizes = {
            run.variant.labels["variant"]: parameters(run.config)
            for run in plan(equal, Sources(equal, None), tmp_path)
            if run.variant.labels["x"] == cell
        }
        before = {
            run.variant.labels["variant"]: parameters(run.config)
            for run in plan(recipe, Sources(recipe, None), tmp_path)
            if run.variant.labels["x"] == cell
        }
        assert sizes["a"] == before["a"]
        assert all(abs(size - sizes["a"]) <= 3 * 64 for size in sizes.values())  # half a channel, two layers
        assert len(set(before.values())) == 3


# Comparisons


TEXT = {"task": None, "data": {"paths": ["x"]}}
HOPS = {"name": "hop_k", "hops": 4, "least_hops": 1, "vocab_size": 16}


def compared(*comparisons: dict[str, str], **changes: object) -> Recipe:
    both = [{"of": "shifted", "against": "plain", **each} for each in comparisons]
    variants = {"plain": {}, "shifted": {"shift": "kv"}}
    return parse_recipe({**VALID, "variants": variants, **changes, "comparisons": both}, "my.toml")


@pytest.mark.parametrize(
    ("metric", "changes"),
    [
        ("loss", {}),
        ("diverged", TEXT),
        ("accuracy", {"data": MIXED, "task": {"name": "repeated"}}),
        ("steps_to_99", {}),
        ("k=4", {"task": HOPS}),
        ("k=4", {"task": {**HOPS, "hops": 2}, "axes": {"hops": {"2": {}, "4": {"task": {"hops": 4}}}}}),
        ("k=1", {"task": {"name": "hop_k", "hops": 2}, "data": MIXED}),
        ("k=1", {"task": {"name": "hop_k", "hops": 2}, "data": {**MIXED, "tokenizer": "somewhere"}}),
        ("test strict", {"task": {"name": "igsm"}}),
    ],
)
def test_runs_are_compared_in_what_they_are_measured_in(metric: str, changes: dict[str, object]) -> None:
    assert compared({"metric": metric}, **changes).comparisons[0].metric == metric


@pytest.mark.parametrize(
    ("comparisons", "changes", "message"),
    [
        ([{"metric": "acuracy"}], {}, "comparisons.metric='acuracy' is not known; did you mean 'accuracy'"),
        ([{"metric": "k=1"}], {}, "comparisons.metric='k=1' is not known; valid names: accuracy, diverged"),
        ([{"metric": "k=5"}], {"task": HOPS}, "comparisons.metric='k=5' is not known; did you mean 'k=4'"),
        ([{"metric": "strict"}], {"task": {"name": "igsm"}}, "did you mean 'test strict'"),
        (
            [{"metric": "k=4"}],
            {"task": HOPS, "variants": {"plain": {"task": {"hops": 2}}, "shifted": {}}},
            "comparisons.metric='k=4' is not known",
        ),
        ([{"metric": "accuracy"}], TEXT, "is not known for text alone, without a [task]; valid names: div"),
        ([{"metric": "steps_to_99"}], TEXT, "comparisons.metric='steps_to_99' is not known for text alone"),
        ([{"of": "plain"}], {}, "comparisons has 'plain' against itself"),
        ([{}, {"metric": "loss"}], {}, "comparisons has 'shifted' against 'plain' in 'loss' twice"),
        ([{"metric": 3}], {}, "comparisons.0.metric=3"),
    ],
)
def test_comparisons_that_nothing_could_come_of_are_refused(
    comparisons: list[dict[str, str]], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        compared(*comparisons, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "table",
    [
        HOPS,
        {**HOPS, "least_hops": 0},
        {"name": "igsm", "operations": 2, "test_operations": 3, "distractors": 1, "inputs": 2, "examined": 2},
    ],
)
def test_a_task_names_the_scores_that_it_gives(table: dict[str, Any]) -> None:
    task = build_task(table)
    assert isinstance(task, Examined)
    config = KeyshiftConfig(
        vocab_size=task.vocab_size, hidden_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    assert tuple(task.examine(KeyshiftForCausalLM(config).eval())) == task.scores


# Overrides


LABELLED = """
title = "t"
task = { name = "induction", sequence_length = 64 }
[variants.plain]
[variants."GVA 0.5"]
mlp = "none"
training = { steps = 7 }
[axes.length."1.5"]
task = { sequence_length = 32 }
[axes.length.long]
[sizes.large.variants.plain]
training = { batch_size = 8 }
"""


@pytest.fixture
def labelled(tmp_path: Path) -> str:
    path = tmp_path / "labelled.toml"
    path.write_text(LABELLED)
    return str(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "training.steps",
            10,
            'training.steps=10 does not reach variants."GVA 0.5", which sets its own; '
            'set variants."GVA 0.5".training.steps too, or change the file',
        ),
        ("training", {"batch_size": 2, "steps": 10}, 'training.steps=10 does not reach variants."GVA 0.5"'),
        ("model.mlp", "swiglu", "model.mlp='swiglu' does not reach variants.\"GVA 0.5\""),
        ("task.sequence_length", 48, 'task.sequence_length=48 does not reach axes.length."1.5"'),
    ],
)
def test_an_override_that_some_runs_would_not_see_is_refused(
    labelled: str, key: str, value: object, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(labelled, {key: value})
    assert message in str(caught.value)


def test_the_length_of_text_that_a_label_sets_is_not_overridden_unseen(tmp_path: Path) -> None:
    path = tmp_path / "text.toml"
    path.write_text('title = "t"\n[data]\npaths = ["x"]\n[variants.a.data]\nsequence_length = 9\n')
    with pytest.raises(UserError, match=r"data\.sequence_length=8 does not reach variants\.a,"):
        load_recipe(str(path), {"data.sequence_length": 8})
    assert load_recipe(str(path), {"data.vocab_size": 300}).data.vocab_size == 300


def test_what_a_size_sets_reaches_every_run(tmp_path: Path) -> None:
    path = tmp_path / "sized.toml"
    rates = "learning_rate = 1e-3"
    head = f'title = "t"\n[task]\nname = "induction"\n[variants.a.training]\n{rates}\n[variants.b]\n'
    path.write_text(f"{head}[sizes.large.training]\nlearning_rate = 1e-4\n")
    with pytest.raises(UserError, match=r"training\.learning_rate=0\.0001 does not reach variants\.a,"):
        load_recipe(str(path), size="large")
    path.write_text(f"{path.read_text()}[sizes.large.variants.a.training]\nlearning_rate = 1e-5\n")
    found = load_recipe(str(path), size="large").grid()
    assert {name: variant.training.learning_rate for name, variant in found.items()} == {"a": 1e-5, "b": 1e-4}


def test_a_size_counts_for_what_overrides_reach(labelled: str) -> None:
    assert load_recipe(labelled, {"training.batch_size": 4}).training.batch_size == 4
    with pytest.raises(UserError, match=r"training\.batch_size=4 does not reach variants\.plain,"):
        load_recipe(labelled, {"training.batch_size": 4}, size="large")


@pytest.mark.parametrize(
    "own",
    [
        {'variants."GVA 0.5".training.steps': 9},
        {'variants."GVA 0.5".training': {"steps": 9}},
        {'variants."GVA 0.5"': {"training": {"steps": 9}}},
    ],
)
def test_labels_are_overridden_by_name_dots_in_quotes(labelled: str, own: dict[str, object]) -> None:
    for overrides, others in ((own, 600), ({"training.steps": 5, **own}, 5)):
        grid = load_recipe(labelled, overrides).grid()
        assert {variant.training.steps for name, variant in grid.items() if "GVA" in name} == {9}
        assert {variant.training.steps for name, variant in grid.items() if "plain" in name} == {others}


# Wrong types


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sizes = 3", "sizes=3 must be a table"),
        ("[[sizes]]", "sizes=[{}] must be a table"),
        ("[sizes]\nquick = 1", "sizes.quick=1 must be a table"),
        ("[sizes.small]\naxes = 3", "sizes.small.axes=3 must be a table"),
        ("[sizes.small]\naxes.width = 3", "axes.width=3 must be a table"),
        ("[sizes.small]\nvariants = 3", "variants=3 must be a table"),
        ("[sizes.small.variants]\na = 3", "variants.a=3 must be a table"),
        ("[variants]\na = 1", "variants.a=1 must be a table"),
        ('[variants]\n"a b" = 1', 'variants."a b"=1 must be a table'),
        ("variants = {}", "variants={}: dictionary should have at least 1 item"),
        ("[[variants]]\nshift = 'kv'", "variants=[{'shift': 'kv'}] must be a table"),
        ("[variants.a]\ntraining = 1", "variants.a.training=1 must be a table"),
        ("[variants.a]\ntask = [1]", "variants.a.task=[1] must be a table"),
        ("[variants.a]\ndata = 'x'", "variants.a.data='x' must be a table"),
        ("axes = 1", "axes=1 must be a table"),
        ("axes.width = 1", "axes.width=1 must be a table"),
        ("axes.width = [{}]", "axes.width=[{}] must be a table"),
        ("axes.width.8 = 8", "axes.width.8=8 must be a table"),
        ("axes.width.8.training = 8", "axes.width.8.training=8 must be a table"),
        ("training = 3", "training=3 must be a table"),
        ("task = 'induction'", "task='induction' must be a table"),
        ("[[task]]", "task=[{}] must be a table"),
        ("data = ['x']", "data=['x'] must be a table"),
        ("data.paths = 'x'", "data.paths='x' must be a list"),
        ("data.paths = [1]", "data.paths.0=1: input should be a valid string"),
        ("model = 1", "model=1 must be a table"),
        ("comparisons = 1", "comparisons=1 must be a list"),
        ("comparisons = [1]", "comparisons.0=1 must be a table"),
        ("[comparisons]\nof = 'a'", "comparisons={'of': 'a'} must be a list"),
        ("[[comparisons]]\nof = 'a'", "comparisons.0.against is missing"),
        ("seeds = 'x'", "seeds='x': input should be a valid integer"),
        ("seeds = 2026-01-01", "seeds=datetime.date(2026, 1, 1): input should be a valid integer"),
        ("title = 3", "title=3: input should be a valid string"),
        ("equal_parameters = ['a']", "equal_parameters=['a']: input should be a valid string"),
        ("task.name = {}", "task.name={} is not known"),
        (f"seeds = {list(range(99))}", "16...: input should be a valid integer"),
    ],
)
def test_a_wrong_type_is_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.toml"
    given = tomllib.loads(text)
    path.write_text(toml({**VALID, **given}))
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 220 + len(str(path))


WORDS = {"schedule", "clipping", "unstable", "trained", "start_from", "distil_from"}
NUMBERS = set(Training.model_fields) - WORDS


@pytest.mark.parametrize("value", [True, False, "3", "0.5", "", [1]])
@pytest.mark.parametrize(
    "place",
    [
        "seeds",
        *(f"data.{key}" for key in ("vocab_size", "sequence_length", "validation_fraction", "task_share")),
        *(f"training.{key}" for key in sorted(NUMBERS)),
    ],
)
def test_only_a_number_is_taken_for_one(place: str, value: object) -> None:
    content: dict[str, Any] = {**VALID, "data": dict(MIXED), "task": {"name": "repeated"}}
    *table, key = place.split(".")
    changed = {key: value} if not table else {table[0]: {**content.get(table[0], {}), key: value}}
    with pytest.raises(UserError, match=rf"^recipe r: {place}=.*: input should be a valid (integer|number)$"):
        parse_recipe({**content, **changed}, "r")
    if table == ["training"] and key != "until_accuracy":  # which is the same for all variants
        with pytest.raises(UserError, match=rf"^variant 'a': {place}=.*: input should be a valid"):
            parse_recipe({**content, "variants": {"a": changed}}, "r")


def test_a_whole_number_may_stand_for_any_other_but_not_the_reverse() -> None:
    whole = {"learning_rate": 1, "weight_decay": 0, "until_accuracy": 1, "shift_weight_decay": 2}
    training = parse_recipe({**VALID, "training": whole}, "r").training
    assert {key: getattr(training, key) for key in whole} == whole
    assert all(isinstance(getattr(training, key), float) for key in whole)
    with pytest.raises(UserError, match=r"training\.steps=10\.0: input should be a valid integer"):
        parse_recipe({**VALID, "training": {"steps": 10.0}}, "r")


def test_what_a_recipe_needs_is_said_to_be_missing() -> None:
    for name in ("title", "variants"):
        with pytest.raises(UserError, match=f"^recipe my.toml: {name} is missing$"):
            parse_recipe({key: value for key, value in VALID.items() if key != name}, "my.toml")


WHOLE = {
    "title": "t",
    "seeds": 1,
    "equal_parameters": "a",
    "task": {"name": "hop_k", "hops": 2, "vocab_size": 16},
    "training": {"steps": 10, "learning_rate": 1e-3, "until_accuracy": 0.9, "schedule": "cosine"},
    "model": {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    },
    "variants": {
        "a": {"attention": "mha", "training": {"steps": 3}},
        "b": {"shift": "kv", "task": {"hops": 3}},
    },
    "axes": {"width": {"8": {"hidden_size": 8}, "16": {"training": {"batch_size": 2}}}},
    "comparisons": [{"of": "b", "against": "a", "axis": "variant", "metric": "k=1"}],
    "sizes": {"large": {"seeds": 2, "model": {"hidden_size": 32}, "axes": {"width": {"32": {}}}}},
}
MIXED_WHOLE = {**WHOLE, "data": {**MIXED, "tokenizer": "somewhere"}, "task": {"name": "hop_k", "hops": 2}}
SCALARS = st.one_of(
    st.sampled_from([True, False, 0, 1, -1, 2**40, 0.5, -0.5, 1e300, "", "x", "a.b", "k=1", "\n", "mha"])
)
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=2), st.dictionaries(st.sampled_from(["", "a", "steps"]), SCALARS)
)


def places(content: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every node of a recipe."""
    inside = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in inside:
        yield (*keys, key)
        yield from places(value, (*keys, key))


def toml(value: Any) -> str:
    """A value as TOML; a table is written in one line, a whole file in one per key."""

    def inline(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return f"[{', '.join(map(inline, value))}]"
        return json.dumps(value) if isinstance(value, bool | int | float | str) else str(value)

    return "\n".join(f"{key} = {inline(each)}" for key, each in value.items())


@settings(max_examples=400, deadline=None)
@given(data=st.data(), size=st.sampled_from(["small", "large"]))
@pytest.mark.parametrize("whole", [WHOLE, MIXED_WHOLE])
def test_whatever_stands_in_a_recipe_is_taken_or_refused_in_one_line(
    whole: dict[str, Any], data: st.DataObject, size: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = copy.deepcopy(whole)
    *way, last = data.draw(st.sampled_from(list(places(content))))
    inside = content
    for key in way:
        inside = inside[key]
    inside[last] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(toml(content))
    with contextlib.suppress(UserError):
        recipe = load_recipe(str(path), size=size)
        assert recipe.grid()
        json.dumps(recipe.model_dump(mode="json"))
        return
    with pytest.raises(UserError, match=r"\A.+\Z"):  # in one line
        load_recipe(str(path), size=size)


# Folders


def test_names_in_any_script_have_folders_of_their_own(tmp_path: Path) -> None:
    names = {
        "α": "α",
        "β": "β",
        "シフト 2": "シフト-2",
        "Größe_3": "größe-3",
        "1-layer GVA + KV shift": "1-layer-gva-kv-shift",
        "GVA, Q_norm (0.5)": "gva-q-norm-0-5",
        "uniform, rate × 10": "uniform-rate-10",
        "++": "variant",
    }
    recipe = parse_recipe({**VALID, "seeds": 1, "variants": {name: {} for name in names}}, "r")
    assert {
        run.variant.name: run.directory.parent.name for run in plan(recipe, Sources(recipe, None), tmp_path)
    } == names
    alike = parse_recipe({**VALID, "variants": {"a b": {}, "A-B": {}}}, "r")
    with pytest.raises(UserError, match="too alike"):
        plan(alike, Sources(alike, None), tmp_path)

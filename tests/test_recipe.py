"""Recipes: the built-in ones are valid, overrides apply, mistakes are named with the nearest valid key."""

import tomllib

import pytest

from keyshift.errors import UserError
from keyshift.recipe import build_task, builtin_recipes, config_fields, load_recipe, parse_recipe
from keyshift.runs import Sources, config_of, parameters, plan

VALID = {"title": "t", "task": {"name": "induction"}, "variants": {"a": {"attention": "gqa"}}}


def reads_text(name: str) -> bool:
    return "data" in tomllib.loads(builtin_recipes()[name].read_text())


@pytest.mark.parametrize("name", sorted(builtin_recipes()))
def test_built_in_recipes_are_valid_down_to_their_models(name):
    recipe = load_recipe(name, {"data.paths": ["x.txt"]} if reads_text(name) else None)
    for variant in recipe.grid().values():
        config_of(variant, vocab_size=300, sequence_length=32)


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
    ],
)
def test_mistakes_are_named_with_a_way_out(change, message):
    with pytest.raises(UserError) as caught:
        parse_recipe({**VALID, **change}, "my.toml")
    assert message in str(caught.value)
    assert "my.toml" in str(caught.value) or "task." in str(caught.value)
    assert "\n" not in str(caught.value)


MIXED = {"paths": ["x"], "vocab_size": 300, "sequence_length": 32, "task_share": 0.5}


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
        config_of(recipe.grid()["odd"], vocab_size=8, sequence_length=16)
    short = parse_recipe({**VALID, "model": {"max_position_embeddings": 8}}, "r")
    with pytest.raises(UserError, match="max_position_embeddings=8 is below sequence_length=16"):
        config_of(short.grid()["a"], vocab_size=8, sequence_length=16)


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
            config_of(variant, vocab_size=300, sequence_length=length)
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

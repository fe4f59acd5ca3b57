"""Recipes: the built-in ones are valid, overrides apply, mistakes are named with the nearest valid key."""

import pytest

from keyshift.compare import configs
from keyshift.errors import UserError
from keyshift.recipe import build_task, builtin_recipes, config_fields, load_recipe, parse_recipe

VALID = {"title": "t", "task": {"name": "induction"}, "variants": {"a": {"attention": "gqa"}}}


@pytest.mark.parametrize("name", sorted(builtin_recipes()))
def test_built_in_recipes_are_valid_down_to_their_models(name):
    recipe = load_recipe(name, None if name == "induction" else {"data.paths": ["x.txt"]})
    assert configs(recipe, vocab_size=300, sequence_length=32).keys() == recipe.variants.keys()


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
        configs(recipe, vocab_size=8, sequence_length=16)
    short = parse_recipe({**VALID, "model": {"max_position_embeddings": 8}}, "r")
    with pytest.raises(UserError, match="max_position_embeddings=8 is below sequence_length=16"):
        configs(short, vocab_size=8, sequence_length=16)


def test_the_three_axes_are_recipe_fields():
    assert {"attention", "position", "shift", "hidden_size", "rope_theta"} <= set(config_fields())

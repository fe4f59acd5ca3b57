"""Recipes that extend others: parts make the whole; chains, sizes, axes; whose mistake it is."""

import copy
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyshift.errors import UserError
from keyshift.recipe import builtin_recipes, load_recipe

BASE = """
title = "base"
seeds = 2
[task]
name = "induction"
[training]
steps = 10
learning_rate = 1e-2
[model]
hidden_size = 16
num_attention_heads = 2
[variants."GQA"]
num_hidden_layers = 1
[variants."MLA"]
attention = "mla"
position = "decoupled_rope"
[axes."width"]
"8" = { hidden_size = 8 }
"16" = { hidden_size = 16 }
[sizes.quick]
training = { steps = 2 }
[sizes.wide]
axes.width."64" = { hidden_size = 64 }
"""


def recipes(folder: Path, **contents: str) -> dict[str, str]:
    """Files of these contents; their paths by name."""
    paths = {}
    for name, content in contents.items():
        path = folder / f"{name}.toml"
        path.write_text(content)
        paths[name] = str(path)
    return paths


def test_tables_are_merged_key_by_key_and_variants_by_name(tmp_path: Path):
    own = """
    extends = "base.toml"
    title = "own"
    [training]
    steps = 20
    [variants."GQA"]
    shift = "kv"
    [variants."more"]
    attention = "gva"
    """
    recipe = load_recipe(recipes(tmp_path, base=BASE, own=own)["own"])
    assert (recipe.title, recipe.seeds) == ("own", 2)
    assert (recipe.training.steps, recipe.training.learning_rate) == (20, 1e-2)
    assert list(recipe.variants) == ["GQA", "MLA", "more"]
    assert recipe.variants["GQA"] == {"num_hidden_layers": 1, "shift": "kv"}
    assert recipe.task == {"name": "induction"}


def test_an_axis_replaces_the_axis_and_other_axes_stay(tmp_path: Path):
    own = """
    extends = "base.toml"
    [axes.width]
    "32" = { hidden_size = 32 }
    [axes.depth]
    "1" = { num_hidden_layers = 1 }
    [axes."with another"]
    "a" = {}
    """
    deeper = 'extends = "own.toml"\n[axes.depth]\n"2" = { num_hidden_layers = 2 }\n'
    files = recipes(tmp_path, base=BASE.replace("num_hidden_layers = 1", ""), own=own, deeper=deeper)
    axes = load_recipe(files["deeper"]).axes
    assert {axis: list(labels) for axis, labels in axes.items()} == {
        "width": ["32"],
        "depth": ["2"],
        "with another": ["a"],
    }


def test_sizes_are_inherited_merged_and_go_over_everything(tmp_path: Path):
    own = """
    extends = "base.toml"
    [training]
    steps = 500
    [sizes.quick]
    seeds = 1
    [sizes.wide.axes.width]
    "128" = { hidden_size = 128 }
    [sizes.huge]
    seeds = 9
    """
    path = recipes(tmp_path, base=BASE, own=own)["own"]
    assert load_recipe(path).training.steps == 500
    quick = load_recipe(path, size="quick")
    assert (quick.training.steps, quick.seeds) == (2, 1)
    assert list(load_recipe(path, size="wide").axes["width"]) == ["128"]
    assert load_recipe(path, size="huge").seeds == 9


def test_overrides_go_over_what_is_inherited(tmp_path: Path):
    path = recipes(tmp_path, base=BASE, own='extends = "base.toml"')["own"]
    assert load_recipe(path, {"training.steps": 3}).training.steps == 3
    with pytest.raises(UserError, match=r"does not reach variants\.GQA"):
        load_recipe(path, {"model.num_hidden_layers": 3})


def test_a_list_replaces_the_list(tmp_path: Path):
    compared = '[[comparisons]]\nof = "{}"\nagainst = "{}"\n'
    files = recipes(
        tmp_path,
        base=BASE + compared.format("GQA", "MLA"),
        own='extends = "base.toml"\n' + compared.format("MLA", "GQA"),
    )
    assert [each.of for each in load_recipe(files["own"]).comparisons] == ["MLA"]


def test_a_chain_is_followed_from_folder_to_folder_and_to_built_in_recipes(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    recipes(tmp_path, middle='extends = "induction"\nseeds = 7\n[training]\nsteps = 9')
    recipes(tmp_path / "deep", low='extends = "../middle.toml"\nseeds = 8')
    top = recipes(tmp_path / "deep" / "er", top='extends = "../low.toml"\n[task]\nvocab_size = 32')["top"]
    recipe, induction = load_recipe(top), load_recipe("induction")
    assert (recipe.seeds, recipe.training.steps) == (8, 9)
    assert recipe.task == {**induction.task, "vocab_size": 32}
    assert recipe.variants == induction.variants


# In parts and whole

WHOLE: dict[str, Any] = {
    "title": "t",
    "seeds": 3,
    "task": {"name": "induction", "vocab_size": 32, "sequence_length": 16},
    "training": {"steps": 5, "learning_rate": 0.01, "batch_size": 2, "schedule": "cosine"},
    "model": {"hidden_size": 16, "num_attention_heads": 2, "rope_theta": 500.0},
    "variants": {"x": {"num_hidden_layers": 1, "shift": "kv"}, "y": {"num_hidden_layers": 2}},
    "axes": {"width": {"8": {"head_dim": 8}, "4": {"head_dim": 4}}},
    "sizes": {"quick": {"seeds": 1, "training": {"steps": 2}}, "long": {"training": {"steps": 50}}},
}
LEAVES = [
    ("title",),
    ("seeds",),
    *[(table, key) for table in ("task", "training", "model") for key in WHOLE[table]],
    *[("variants", name, key) for name, fields in WHOLE["variants"].items() for key in fields],
    ("axes", "width"),
    ("sizes", "quick", "seeds"),
    ("sizes", "quick", "training"),
    ("sizes", "long"),
]


def at(content: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        content = content[key]
    return content


def put(content: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    content[keys[-1]] = copy.deepcopy(value)


def as_toml(content: dict[str, Any]) -> str:
    """Nested tables, inline; enough of TOML for these recipes."""

    def value(each: Any) -> str:
        if isinstance(each, dict):
            return "{" + ", ".join(f'"{key}" = {value(inner)}' for key, inner in each.items()) + "}"
        return f'"{each}"' if isinstance(each, str) else str(each).lower()

    return "".join(f'"{key}" = {value(each)}\n' for key, each in content.items())


@given(st.lists(st.integers(0, 2), min_size=len(LEAVES), max_size=len(LEAVES)), st.data())
def test_a_recipe_in_parts_is_the_whole(parts: list[int], data: st.DataObject):
    """Every value is in one of three files that extend each other; a lower one may have another."""
    layers: list[dict[str, Any]] = [{}, {}, {}]  # the top first
    for keys, part in zip(LEAVES, parts, strict=True):
        put(layers[part], keys, at(WHOLE, keys))
        if part < 2 and data.draw(st.booleans()):
            below = data.draw(st.integers(part + 1, 2))
            put(layers[below], keys, other(at(WHOLE, keys)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = recipes(folder, whole=as_toml(WHOLE))["whole"]
        for index, layer in enumerate(layers):
            extends = {} if index == 2 else {"extends": f"layer{index + 1}.toml"}
            recipes(folder, **{f"layer{index}": as_toml({**extends, **layer})})
        for size in ("small", "quick", "long"):
            made = load_recipe(str(folder / "layer0.toml"), size=size)
            assert made == load_recipe(whole, size=size)


def other(value: Any) -> Any:
    """A value of the same kind that is not it."""
    if isinstance(value, dict):
        return {key: other(inner) for key, inner in value.items()}
    if isinstance(value, str):
        return {"induction": "repeated", "cosine": "linear", "kv": "k"}.get(value, "another")
    return value * 2


# Mistakes


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"top": 'extends = "bsae.toml"'}, r"top.toml: extends='bsae.toml' is neither built in nor a file"),
        ({"top": 'extends = "indction"'}, r"top.toml: .* did you mean 'induction'\?"),
        ({"top": "extends = 3"}, r"top.toml: extends=3 must be the name"),
        ({"top": 'extends = "top.toml"'}, r"top.toml: .* circle: top.toml → top.toml"),
        (
            {"top": 'extends = "a.toml"', "a": 'extends = "b.toml"', "b": 'extends = "a.toml"'},
            r"b.toml: extends='a.toml' goes in a circle: top.toml → a.toml → b.toml → a.toml",
        ),
        ({"top": 'extends = "a.toml"', "a": "title ="}, r"a.toml is not valid TOML"),
        ({"top": 'extends = "a.toml"', "a": BASE + "\n[trainin]\n"}, r"a.toml: trainin is not known"),
        ({"top": 'extends = "a.toml"\n[trainin]', "a": BASE}, r"top.toml: trainin is not known"),
        (
            {"top": 'extends = "a.toml"', "a": BASE.replace("steps = 10", 'steps = "many"')},
            r"a.toml: training.steps='many'",
        ),
        (
            {"top": 'extends = "a.toml"', "a": BASE.replace("hidden_size = 16\n", "hidden_sise = 16\n")},
            r"a.toml: model.hidden_sise is not known; did you mean 'hidden_size'",
        ),
        (
            {"top": 'extends = "a.toml"\n[variants."n"]\natention = "gva"', "a": BASE},
            r"top.toml: variants.n.atention is not known; did you mean 'attention'",
        ),
        (
            {"top": 'extends = "a.toml"\n[axes.n.x]\natention = "gva"', "a": BASE},
            r"top.toml: axes.n.x.atention is not known",
        ),
        ({"top": 'extends = "a.toml"', "a": 'title = "a"'}, r"top.toml: variants is missing"),
        ({"top": 'extends = "a.toml"\nsizes = 3', "a": BASE}, r"sizes=3 must be a table"),
        ({"top": 'extends = "a.toml"\naxes = 3', "a": BASE}, r"top.toml: axes=3 must be a table"),
    ],
)
def test_the_file_with_the_mistake_is_named(tmp_path: Path, contents: dict[str, str], message: str):
    files = recipes(tmp_path, **contents)
    with pytest.raises(UserError, match=message) as error:
        load_recipe(files["top"])
    assert "\n" not in str(error.value).split("is not valid TOML")[0]


def test_built_in_recipes_that_extend_others_say_so_by_name():
    """A path would not be found from a copy of the file elsewhere."""
    for path in builtin_recipes().values():
        for name in re.findall(r'^extends = "(.*)"', path.read_text(), re.MULTILINE):
            assert name in builtin_recipes()

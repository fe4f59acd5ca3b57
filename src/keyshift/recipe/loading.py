"""Recipes found and read: built-in ones, files, their sizes, and overrides on top."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keyshift.errors import UserError, nearest
from keyshift.recipe.checks import check_reach, check_recipe
from keyshift.recipe.schema import SMALL, TABLES, Recipe
from keyshift.recipe.wording import as_table, first_problem, key_path, keys_of


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with keyshift, by name."""
    package = Path(__file__).parents[1]
    folder = package / "recipes"
    if not folder.is_dir():  # a checkout keeps them at its root; a wheel carries them inside the package
        folder = package.parents[1] / "recipes"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.toml"))}


def load_recipe(name_or_path: str, overrides: dict[str, Any] | None = None, size: str = SMALL) -> Recipe:
    """Read a recipe at one of its sizes and apply ``overrides`` (``{"training.steps": 100}``) on top.

    ``small`` is the file as it is; ``[sizes.NAME]`` holds what is different at another size. An axis that it
    has replaces that axis, so that labels of one size need not be true of another. A key with dots in it is
    quoted in overrides: ``variants."GVA 0.5".shift``.

    Raises:
        UserError: no such recipe or size, not TOML, unknown keys (with the nearest valid one), values of a
            wrong type, an override, or a setting of a size, that does not reach every variant.
    """
    builtin = builtin_recipes()
    path = builtin.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise UserError(
            f"recipe {name_or_path!r} is neither a file nor built in; {nearest(name_or_path, builtin)}"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error
    sized = _choose_size(content, size, name_or_path)
    changes = {keys_of(dotted): value for dotted, value in (overrides or {}).items()}
    for keys, value in changes.items():
        _set(content, keys, value)
    recipe = parse_recipe(content, str(path))
    check_reach(recipe, {**sized, **changes}, str(path))
    check_reach(recipe, changes, str(path))  # what the size gives a label hides an override, too
    return recipe


def parse_recipe(content: dict[str, Any], origin: str) -> Recipe:
    """Check the content of a recipe; ``origin`` names it in errors.

    Raises:
        UserError: unknown keys, values of a wrong type, tables or comparisons that do not fit each other.
    """
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"recipe {origin}: {first_problem(error, Recipe, TABLES)}") from error
    check_recipe(recipe, origin)
    return recipe


def _choose_size(content: dict[str, Any], size: str, name: str) -> dict[tuple[str, ...], Any]:
    """Take the table of sizes out of ``content``, and put what one of them changes over the rest.

    Returns:
        What it changes, by the keys that lead there.

    Raises:
        UserError: an unknown size, or tables of ``[sizes]`` that are none; ``name`` names the recipe.
    """
    sizes = {SMALL: {}, **as_table(content.pop("sizes", {}), f"recipe {name}: sizes")}
    for other, changes in sizes.items():
        as_table(changes, f"recipe {name}: {key_path('sizes', other)}")
    if size not in sizes:
        raise UserError(f"size={size!r} is not known to recipe {name!r}; {nearest(size, sizes)}")
    axes = as_table(sizes[size].get("axes", {}), f"recipe {name}: {key_path('sizes', size, 'axes')}")
    replaced = content.get("axes", {})
    if isinstance(replaced, dict):  # what it is instead is refused with the rest
        content["axes"] = {axis: labels for axis, labels in replaced.items() if axis not in axes}
    _merge(content, sizes[size])
    return {(key,): value for key, value in sizes[size].items()}


def _merge(content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put ``changes`` over ``content``, table by table."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(content.get(key), dict):
            _merge(content[key], value)
        else:
            content[key] = value


def _set(content: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    *tables, key = keys
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise UserError(f"--set {key_path(*keys)}: {table!r} is not a table")
    content[key] = value

"""Recipes found and read: built-in ones, files, what they extend, their sizes, and overrides on top."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from keyshift.errors import UserError, nearest
from keyshift.recipe.checks import check_reach, check_recipe, config_fields
from keyshift.recipe.schema import OVERRIDABLE, SMALL, TABLES, Recipe
from keyshift.recipe.wording import as_table, first_problem, key_path, keys_of, shown


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with keyshift, by name."""
    package = Path(__file__).parents[1]
    folder = package / "recipes"
    if not folder.is_dir():  # a checkout keeps them at its root; a wheel carries them inside the package
        folder = package.parents[1] / "recipes"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.rglob("*.toml"))}


def results_folder(name_or_path: str, size: str) -> Path:
    """Where results of a recipe go unless the user says: ``runs/RECIPE``, or ``runs/SIZE/RECIPE``."""
    name = name_or_path if name_or_path in builtin_recipes() else Path(name_or_path).stem
    return (Path("runs") if size == SMALL else Path("runs") / size) / name


def load_recipe(
    name_or_path: str,
    overrides: dict[str, Any] | None = None,
    size: str = SMALL,
    *,
    text_named: bool = True,
) -> Recipe:
    """Read a recipe at one of its sizes and apply ``overrides`` (``{"training.steps": 100}``) on top.

    ``small`` is the file as it is; ``[sizes.NAME]`` holds what is different at another size. An axis that it
    has replaces that axis, so that labels of one size need not be true of another. A key with dots in it is
    quoted in overrides: ``variants."GVA 0.5".shift``.

    ``extends`` names a recipe that this one goes over: a built-in one, or a file, from this one's folder.
    Tables are merged key by key, those of variants and sizes too; as with sizes an axis replaces the axis,
    and a list the list.

    ``text_named=False`` lets a recipe that reads text pass without saying where it is: nothing will be read.

    Raises:
        UserError: no such recipe or size, not TOML, unknown keys (with the nearest valid one), values of a
            wrong type, an override, or a setting of a size, that does not reach every variant; a recipe to
            extend that is not there, or that extends this one in turn.
    """
    builtin = builtin_recipes()
    path = builtin.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise UserError(
            f"recipe {name_or_path!r} is neither a file nor built in; {nearest(name_or_path, builtin)}"
        )
    content = _read_extended(path)
    sized = _choose_size(content, size, name_or_path)
    changes = {keys_of(dotted): value for dotted, value in (overrides or {}).items()}
    for keys, value in changes.items():
        _set(content, keys, value)
    recipe = parse_recipe(content, str(path), text_named=text_named)
    check_reach(recipe, {**sized, **changes}, str(path))
    check_reach(recipe, changes, str(path))  # what the size gives a label hides an override, too
    return recipe


def parse_recipe(content: dict[str, Any], origin: str, *, text_named: bool = True) -> Recipe:
    """Check the content of a recipe; ``origin`` names it in errors, ``text_named`` is that of `load_recipe`.

    Raises:
        UserError: unknown keys, values of a wrong type, tables or comparisons that do not fit each other.
    """
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise UserError(f"recipe {origin}: {first_problem(error, Recipe, TABLES)}") from error
    check_recipe(recipe, origin, text_named=text_named)
    return recipe


def _read_extended(path: Path) -> dict[str, Any]:
    """The content of a recipe over that of the one it extends, and so on; without ``extends`` itself."""
    files, layers = [path], [_read(path)]
    while (extends := layers[-1].pop("extends", None)) is not None:
        files.append(_extended(extends, files))
        layers.append(_read(files[-1]))
    content: dict[str, Any] = {}
    for file, layer in zip(reversed(files), reversed(layers), strict=True):
        if len(files) > 1:
            _check_alone(layer, str(file))
        _put_over(content, layer)
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not valid TOML: {error}") from error


def _extended(name: Any, files: list[Path]) -> Path:
    """The file that the last of ``files`` extends.

    Raises:
        UserError: there is none, or it is among ``files`` already.
    """
    where = f"recipe {files[-1]}: extends={shown(name)}"
    if not isinstance(name, str):
        raise UserError(f"{where} must be the name of a built-in recipe, or a file")
    builtin = builtin_recipes()
    path = builtin.get(name, files[-1].parent / name)
    if not path.is_file():
        raise UserError(f"{where} is neither built in nor a file in its folder; {nearest(name, builtin)}")
    if any(path.samefile(file) for file in files):
        way = " → ".join(file.name for file in (*files, path))
        raise UserError(f"{where} goes in a circle: {way}; extend another recipe")
    return path


def _check_alone(content: dict[str, Any], origin: str) -> None:
    """Raises `UserError` for keys and types that are wrong in this file, whatever it is merged with."""
    absent: dict[str, Any] = {"title": "", "variants": {"": {}}}
    own = {key: value for key, value in content.items() if key != "sizes"}
    try:
        recipe = Recipe.model_validate({**absent, **own})
    except ValidationError as error:
        raise UserError(f"recipe {origin}: {first_problem(error, Recipe, TABLES)}") from error
    tables: dict[tuple[str, ...], dict[str, Any]] = {("model",): recipe.model}
    tables |= {("variants", name): settings for name, settings in recipe.variants.items()}
    for axis, labels in recipe.axes.items():
        tables |= {("axes", axis, label): settings for label, settings in labels.items()}
    known = [*sorted(OVERRIDABLE), *config_fields()]
    for where, settings in tables.items():
        for field in settings:
            if field not in known:
                raise UserError(
                    f"recipe {origin}: {key_path(*where, field)} is not known; {nearest(field, known)}"
                )


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
    as_table(sizes[size].get("axes", {}), f"recipe {name}: {key_path('sizes', size, 'axes')}")
    _put_over(content, sizes[size])
    return {(key,): value for key, value in sizes[size].items()}


def _put_over(content: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put a recipe, or what one of its sizes changes, over ``content``: as `_merge`, but an axis replaces the
    axis."""
    for key, value in changes.items():
        below = content.get(key)
        if not isinstance(value, dict) or not isinstance(below, dict):
            content[key] = value
        elif key == "axes":
            content[key] = {**{axis: labels for axis, labels in below.items() if axis not in value}, **value}
        elif key == "sizes":
            for size, own in value.items():
                if isinstance(own, dict) and isinstance(below.get(size), dict):
                    _put_over(below[size], own)
                else:
                    below[size] = own
        else:
            _merge(below, value)


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
            raise UserError(f"{key_path(*keys)}={shown(value)}: {table!r} is not a table")
    content[key] = value

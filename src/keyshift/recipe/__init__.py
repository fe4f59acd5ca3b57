"""A recipe: what to train (variants), on what (a task, text or both), and how. In TOML, checked here."""

from keyshift.recipe.checks import config_fields
from keyshift.recipe.loading import builtin_recipes, load_recipe, parse_recipe, results_folder
from keyshift.recipe.schema import (
    SMALL,
    VARIANT,
    Comparison,
    Engine,
    Recipe,
    TextData,
    Training,
    Variant,
    described,
    number,
)
from keyshift.recipe.task_table import build_task
from keyshift.recipe.wording import key_path, shown

__all__ = [
    "SMALL",
    "VARIANT",
    "Comparison",
    "Engine",
    "Recipe",
    "TextData",
    "Training",
    "Variant",
    "build_task",
    "builtin_recipes",
    "config_fields",
    "described",
    "key_path",
    "load_recipe",
    "number",
    "parse_recipe",
    "results_folder",
    "shown",
]

"""Robust training: one loop, recipes as TOML files, objectives as functions."""

from holdfast.errors import Interrupted
from holdfast.training.context import Context
from holdfast.training.loop import train
from holdfast.training.recipe.overrides import parse_override
from holdfast.training.recipe.reading import list_recipes, load_recipe
from holdfast.training.recipe.recipe import Recipe

__all__ = ["Context", "Interrupted", "Recipe", "list_recipes", "load_recipe", "parse_override", "train"]

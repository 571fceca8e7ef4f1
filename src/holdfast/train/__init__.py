"""Robust training: one loop, recipes as TOML files, objectives as functions."""

from holdfast.train.context import Context
from holdfast.train.interrupt import Interrupted
from holdfast.train.loop import train
from holdfast.train.recipe import Recipe, list_recipes, load_recipe, parse_override

__all__ = ["Context", "Interrupted", "Recipe", "list_recipes", "load_recipe", "parse_override", "train"]

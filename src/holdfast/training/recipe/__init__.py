"""Recipes: the TOML files, how they are read, and which of their keys contradict each other."""

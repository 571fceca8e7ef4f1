"""Modules that answer with a proof."""

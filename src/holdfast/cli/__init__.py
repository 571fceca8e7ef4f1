"""The command line."""

from holdfast.cli.commands import app, main

__all__ = ["app", "main"]

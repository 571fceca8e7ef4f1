"""The command line."""

from holdfast.cli.main import app, main

__all__ = ["app", "main"]

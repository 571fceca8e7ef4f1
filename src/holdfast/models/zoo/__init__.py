"""Architectures, one family to a file."""

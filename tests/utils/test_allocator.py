"""Freed memory is kept for reuse, except in reference mode."""

import pytest

import holdfast as hf
from holdfast.utils import allocator


@pytest.mark.parametrize("plain", [False, True])
def test_no_block_is_freed_in_reference_mode(plain, monkeypatch):
    calls = []
    monkeypatch.setattr(allocator, "_free_one_block", lambda: calls.append(1))
    if plain:
        with hf.reference():
            allocator.reuse_blocks()
    else:
        allocator.reuse_blocks()
    assert len(calls) == (not plain)

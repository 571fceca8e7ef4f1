"""Packed tensors of a model: sizes that a file cannot hold, parts that are missing."""

import pytest
import torch

from holdfast.models.packed import LARGEST, pack_state, packed_sizes, unpack_state

STATE = {"w": torch.tensor([[0.0] * 60 + [1.0, -1.0]]), "bias": torch.tensor([0.0, 1.0]), "n": torch.tensor(3)}


def test_matrices_are_packed_and_the_rest_stays_whole():
    packed = pack_state(STATE)
    assert set(packed.about) == {"w"}
    assert {"bias", "n"} < set(packed.tensors)
    assert packed.size_of("w") < 62 * 4
    again = unpack_state(packed.tensors, packed.record)
    assert set(again) == set(STATE)
    assert all(torch.equal(again[name], tensor) for name, tensor in STATE.items())


def test_a_file_cannot_ask_for_more_memory_than_it_can_fill():
    packed = pack_state(STATE)
    sizes = {name: tuple(tensor.shape) for name, tensor in packed.tensors.items()}
    assert packed_sizes(sizes, packed.record, 500) == {"w": (1, 62), "bias": (2,), "n": ()}
    packed.about["w"]["shape"] = [1, LARGEST * 500 + 1]
    with pytest.raises(ValueError, match=r"its 500 bytes cannot hold the 4,096,001 values"):
        packed_sizes(sizes, packed.record, 500)
    packed.about["w"]["shape"] = [-1, -62]
    with pytest.raises(ValueError, match="cannot hold"):
        packed_sizes(sizes, packed.record, 500)


def test_missing_parts_are_named():
    packed = pack_state(STATE)
    record = packed.record
    del packed.tensors["w#signs"]
    with pytest.raises(ValueError, match="checksum"):
        unpack_state(packed.tensors, record)
    with pytest.raises(ValueError, match="the parts of 'w' do not fit"):
        unpack_state(packed.tensors, packed.record)

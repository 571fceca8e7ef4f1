"""What all runs that can be resumed share."""

import numpy as np
import pytest

from holdfast.errors import InputError, StorageError
from holdfast.utils.resume import as_stored, check_same, load_arrays, reading, save_arrays


def test_settings_are_compared_as_a_file_gives_them_back():
    now = {"steps": (1, 2), "kind": int, "eps": 0.1}
    check_same(as_stored(now), now, "'run'")
    with pytest.raises(
        InputError, match=r"'run' holds the results of another run \(eps: was 0.1, is None; n: was None"
    ):
        check_same(as_stored(now), {"steps": [1, 2], "kind": int, "n": 3}, "'run'")


def test_arrays_come_back_as_they_were(tmp_path):
    arrays = {"x": np.arange(6.0).reshape(2, 3), "by": np.array(["pgd", ""])}
    save_arrays(tmp_path / "deep" / "part.npz", arrays)
    found = load_arrays(tmp_path / "deep" / "part.npz")
    assert list(found) == list(arrays)
    for name, values in arrays.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("content", [b"", b"PK nonsense", b"\x93NUMPY", None])
def test_a_damaged_file_is_named_with_the_way_out(tmp_path, content):
    path = tmp_path / "part.npz"
    if content is None:
        np.savez(path, x=np.array([object()]))
    else:
        path.write_bytes(content)
    with pytest.raises(StorageError, match=r"cannot read '.*part\.npz': .*; delete it"), reading(path, "delete it"):
        load_arrays(path)


def test_what_is_missing_is_for_the_caller_to_say(tmp_path):
    with pytest.raises(FileNotFoundError), reading(tmp_path / "none.npz", "delete it"):
        load_arrays(tmp_path / "none.npz")

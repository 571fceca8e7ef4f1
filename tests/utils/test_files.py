"""The one atomic write: whole or not at all, with the mode of the user's umask and an error that says what to do."""

import json
import os
import threading

import pytest

from holdfast.errors import StorageError
from holdfast.utils.files import remove_leftovers, write_bytes, write_csv, write_json, write_text, write_whole


def test_texts_bytes_and_json_replace_what_was_there(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    for write, content, expected in (
        (write_text, "ä\n", "ä\n".encode()),
        (write_bytes, b"\x00\xff", b"\x00\xff"),
        (write_csv, [("a", "b"), ("x, y", None)], b'a,b\n"x, y",\n'),
        (write_json, {"b": 1, "a": [None]}, b'{\n  "a": [\n    null\n  ],\n  "b": 1\n}\n'),
    ):
        write(path, content)
        assert path.read_bytes() == expected
    assert [file.name for file in path.parent.iterdir()] == ["file"]


def test_the_mode_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("no space"), KeyboardInterrupt()]
)
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(file):
        file.write(b"half")
        raise error

    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError
    with pytest.raises(expected) as caught:
        write_whole(path, fail, way_out="take another disk")
    if expected is StorageError:
        assert "space" in str(caught.value)
        assert str(caught.value).endswith("What was there is untouched; take another disk.")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_json_does_not_know_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "file", {"a": float("nan")})
    assert not list(tmp_path.iterdir())


def test_several_writers_of_one_file_do_not_mix(tmp_path):
    path = tmp_path / "file"
    texts = [json.dumps([i] * 5000) for i in range(6)]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    names = ("a-1.npz", ".a-1.npz.0123abcd", ".b.0123abcd", ".b.keep")
    for name in names:
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path / "a-*.npz", tmp_path / "b", tmp_path / "missing" / "c")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".b.keep", "a-1.npz"]

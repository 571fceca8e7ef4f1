"""Files appear whole or not at all."""

import os
import resource
import stat

import pytest

from holdfast.errors import StorageError
from holdfast.utils.files import write_bytes, write_json, write_text


def test_files_are_written_into_folders_that_are_made(tmp_path):
    write_text(tmp_path / "a" / "b.txt", "é\n")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"\xc3\xa9\n"
    write_bytes(tmp_path / "a" / "b.txt", b"\0")
    assert (tmp_path / "a" / "b.txt").read_bytes() == b"\0"
    write_json(tmp_path / "c.json", {"b": [1], "a": None})
    assert (tmp_path / "c.json").read_text() == '{\n  "a": null,\n  "b": [\n    1\n  ]\n}\n'
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b.txt", "c.json"]


def test_the_mode_of_a_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "file", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*file: .*untouched; make room"):
            write_bytes(tmp_path / "file", b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_in_the_place_of_a_folder_is_an_error_of_ours(tmp_path):
    write_text(tmp_path / "file", "")
    with pytest.raises(StorageError, match="cannot write"):
        write_text(tmp_path / "file" / "inside", "")

"""Downloads against a local server: whole, cut off, resumed, damaged, missing, refused."""

import hashlib
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.data import download, load_data
from holdfast.data.downloads import download_file
from holdfast.data.sources import SOURCES, RemoteFile
from holdfast.errors import InputError, StorageError

BODY = np.random.default_rng(0).bytes(700_000)
MD5 = hashlib.md5(BODY).hexdigest()
WriteIdx = Callable[..., dict[str, np.ndarray]]


@pytest.fixture
def tiny_mnist(server, tmp_path: Path, write_idx: WriteIdx, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has an MNIST of five images, and the table of sources its checksums."""
    write_idx(tmp_path / "origin")
    server.files = {file.name: file.read_bytes() for file in (tmp_path / "origin").iterdir()}
    files = tuple(
        RemoteFile(file.name, hashlib.md5(server.files[file.name]).hexdigest(), len(server.files[file.name]))
        for file in SOURCES["mnist"].files
    )
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], files=files))


@pytest.mark.usefixtures("tiny_mnist")
def test_download_then_load(server, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = download("mnist", mirror=server.url + "/")
    assert folder == tmp_path / "cache" / "mnist"
    assert sorted(file.name for file in folder.iterdir()) == sorted(server.files)
    assert len(load_data("mnist").train) == 5
    out, err = capfd.readouterr()
    assert out == ""
    assert "t10k-labels-idx1-ubyte.gz" in err
    asked = len(server.requests)
    download("mnist", mirror=server.url, progress=False)
    assert len(server.requests) == asked
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("tiny_mnist")
def test_damaged_local_file_is_fetched_again(server, tmp_path: Path) -> None:
    folder = download("mnist", tmp_path / "r", mirror=server.url, progress=False)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    server.requests.clear()
    download("mnist", tmp_path / "r", mirror=server.url, progress=False)
    assert server.requests == [("t10k-labels-idx1-ubyte.gz", None)]
    assert len(load_data("mnist", root=tmp_path / "r").test) == 3


def test_cut_connection_is_told_and_resumed(server, tmp_path: Path) -> None:
    server.files, server.cut_after = {"f": BODY}, 300_000
    target = tmp_path / "f"
    with pytest.raises(StorageError, match=r"after 300,000 of 700,000 bytes\. Run the same command again"):
        download_file(f"{server.url}/f", target, MD5)
    assert not target.exists()
    server.cut_after = None
    seen: list[int] = []
    download_file(f"{server.url}/f", target, MD5, on_progress=seen.append)
    assert target.read_bytes() == BODY
    assert server.requests == [("f", None), ("f", "bytes=300000-")]
    assert seen[0] > 300_000
    assert seen[-1] == 700_000
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_server_that_ignores_the_range(server, tmp_path: Path) -> None:
    server.files, server.ignore_range = {"f": BODY}, True
    (tmp_path / "f.part").write_bytes(b"old start")
    download_file(f"{server.url}/f", tmp_path / "f", MD5)
    assert (tmp_path / "f").read_bytes() == BODY


def test_part_that_is_whole_already(server, tmp_path: Path) -> None:
    server.files = {"f": BODY}
    (tmp_path / "f.part").write_bytes(BODY)
    download_file(f"{server.url}/f", tmp_path / "f", MD5)
    assert (tmp_path / "f").read_bytes() == BODY


def test_body_of_unknown_length(server, tmp_path: Path) -> None:
    server.files, server.say_length = {"f": BODY}, False
    download_file(f"{server.url}/f", tmp_path / "f", MD5)
    assert (tmp_path / "f").read_bytes() == BODY


@pytest.mark.parametrize("start", [b"", b"wrong start", BODY + b"more"])
def test_wrong_checksum_leaves_nothing(server, tmp_path: Path, start: bytes) -> None:
    server.files = {"f": BODY + b"x"}
    if start:
        (tmp_path / "f.part").write_bytes(start)
    with pytest.raises(StorageError, match=f"MD5 sum [0-9a-f]{{32}}, expected {MD5}"):
        download_file(f"{server.url}/f", tmp_path / "f", MD5)
    assert list(tmp_path.iterdir()) == []


def test_checksums_of_the_table_are_used(server, tmp_path: Path) -> None:
    server.files = {file.name: b"something else" for file in SOURCES["svhn"].files}
    with pytest.raises(StorageError, match="expected e26dedcc434d2e4c54c9b2d4a06d8373"):
        download("svhn", tmp_path, mirror=server.url, progress=False)


def test_missing_on_the_server(server, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=re.escape(f"{server.url}/cifar-10-python.tar.gz: the server answered 404")):
        download("cifar10", tmp_path, mirror=server.url, progress=False)


def test_no_server(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StorageError, match=r"cannot reach .*refused.*Check the network"):
        download("cifar10", tmp_path, mirror=f"http://127.0.0.1:{port}", progress=False)


def test_silent_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/f"
        with pytest.raises(StorageError, match=r"cannot reach .*timed out"):
            download_file(url, tmp_path / "f", MD5, timeout=0.2)


def test_server_falls_silent_in_the_middle(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = f"http://127.0.0.1:{listener.getsockname()[1]}/f"
        listener.settimeout(5)
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 600000\r\n\r\n" + BODY[:300_000]
        done = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                done.wait(5)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StorageError, match=r"connection broke .*timed out.*again to go on"):
            download_file(client, tmp_path / "f", MD5, timeout=0.3)
        done.set()
        thread.join()
    assert (tmp_path / "f.part").stat().st_size > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(server, tmp_path: Path) -> None:
    server.files = {"f": BODY}
    (tmp_path / "f.part").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"cannot write .*f\.part' \(No space left on device\)\. Free some space"):
        download_file(f"{server.url}/f", tmp_path / "f", MD5)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write .*HOLDFAST_CACHE"):
        download("mnist", tmp_path / "file", mirror="http://127.0.0.1:9", progress=False)


@pytest.mark.parametrize(
    ("name", "mirror", "message"),
    [
        ("mnist-mini", None, "needs no download"),
        ("two-moons", None, "needs no download"),
        ("cifar", None, "unknown data set 'cifar'.*Did you mean 'cifar10'"),
        ("mnist", "file:///etc", "must be an http:// or https:// address"),
    ],
)
def test_bad_requests(name: str, mirror: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        download(name, mirror=mirror)


def test_table_of_sources_is_well_formed() -> None:
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.url.startswith(("http://", "https://"))
        assert not source.url.endswith("/")
        for file in source.files:
            assert re.fullmatch("[0-9a-f]{32}", file.md5)
            assert file.size > 0
    assert SOURCES["svhn"].size == 182_040_794 + 64_275_384

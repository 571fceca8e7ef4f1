"""Tiny files in each of the formats, and a local web server that can misbehave."""

import gzip
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

RNG = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees the user's cache or proxy."""
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def write_idx() -> Callable[..., dict[str, np.ndarray]]:
    """Writes an MNIST-style folder of 5 + 3 images of 6 x 4 pixels; returns the arrays by file stem."""

    def write(folder: Path, *, gz: bool = True) -> dict[str, np.ndarray]:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            "train-images-idx3-ubyte": RNG.integers(0, 256, (5, 6, 4), dtype=np.uint8),
            "train-labels-idx1-ubyte": np.array([0, 1, 2, 9, 4], dtype=np.uint8),
            "t10k-images-idx3-ubyte": RNG.integers(0, 256, (3, 6, 4), dtype=np.uint8),
            "t10k-labels-idx1-ubyte": np.array([3, 3, 0], dtype=np.uint8),
        }
        for stem, array in arrays.items():
            content = idx_bytes(array)
            name = f"{stem}.gz" if gz else stem
            (folder / name).write_bytes(gzip.compress(content) if gz else content)
        return arrays

    return write


@dataclass
class Server:
    """What the server serves, how it misbehaves, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None
    ignore_range: bool = False
    say_length: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, range_ = self.path.lstrip("/"), self.headers.get("Range")
            server.requests.append((name, range_))
            if name not in server.files:
                self.send_error(404)
                return
            body, start = server.files[name], 0
            if range_ and not server.ignore_range:
                start = int(range_.removeprefix("bytes=").removesuffix("-"))
                if start >= len(body):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            if server.say_length:
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start:][: server.cut_after])

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    with ThreadingHTTPServer(("127.0.0.1", 0), _handler(state)) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_port}"
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        httpd.shutdown()
        thread.join()

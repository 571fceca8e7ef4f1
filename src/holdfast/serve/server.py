"""Put the page on a socket."""

import ipaddress
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from holdfast.errors import InputError, StorageError
from holdfast.serve.app import make_app
from holdfast.serve.connections import TimedProtocol
from holdfast.serve.shield import PARAMETER, known_hosts
from holdfast.serve.subjects import Subject


def run(root: Path, *, host: str, port: int, subject: Subject | None, announce: Callable[[str], None]) -> None:
    """Serves until it is interrupted; `announce` gets the address, once there is somebody to answer."""
    if not root.is_dir():
        raise StorageError(f"there is no folder '{root}'; give the folder that holds your runs")
    with bind(host, port) as bound:
        loopback = is_loopback(bound)
        token = None if loopback else secrets.token_urlsafe(32)
        app = make_app(root, subject=subject, token=token, known=known_hosts(host, loopback=loopback))
        announce(address(host, bound.getsockname()[1], token))
        make_server(app).run(sockets=[bound])


def make_server(app: ASGIApp) -> uvicorn.Server:
    """The server of the application; uvicorn's own limit would also count connections that wait for a client."""
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
        log_level="warning",
        access_log=False,  # it would keep the token
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_keep_alive=5,
    )
    return uvicorn.Server(config)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any that is free."""
    try:
        family, *_, place = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(place[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise InputError(
            f"cannot listen on host '{host}', port {port}: {error}; another --port (0 for any) may be free"
        ) from error


def is_loopback(bound: socket.socket) -> bool:
    """Is it reached from this machine only?"""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser.

    >>> address("::1", 8787, None)
    'http://[::1]:8787/'
    """
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + ("" if token is None else f"?{PARAMETER}={token}")

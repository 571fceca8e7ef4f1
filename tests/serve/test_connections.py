"""Clients that open connections and do not get on: dropped within seconds, and nobody else is locked out meanwhile."""

import asyncio
import http.client
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("uvicorn")

from holdfast.serve import connections
from holdfast.serve.app import make_app
from holdfast.serve.server import bind, make_server

HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: "
SLOW_BODY = (
    b"POST /api/try HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
)
MANY = 120


@pytest.fixture
def short(monkeypatch):
    """Times that a test can wait for; on a busy machine a whole request must still arrive in them."""
    for name, seconds in (("HEADERS", 3.0), ("WHOLE", 4.0), ("WRITING", 3.0)):
        monkeypatch.setattr(connections, name, seconds)


@contextmanager
def serving(app):
    """A server on a port of its own; yields the port, and the connections that it has."""
    bound, server = bind("127.0.0.1", 0), make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        yield bound.getsockname()[1], server.server_state.connections
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        bound.close()
        assert not thread.is_alive()


@contextmanager
def opened(port, count, content, *, source=None):
    """So many connections that have sent this and nothing more."""
    sockets = []
    try:
        for _ in range(count):
            made = socket.create_connection(("127.0.0.1", port), timeout=20, source_address=source)
            sockets.append(made)
            with suppress(OSError):
                made.sendall(content)
        yield sockets
    finally:
        for made in sockets:
            made.close()


def get(port, path="/api/runs", *, source=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20, source_address=source)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def is_closed(made, seconds):
    """Whether the server ends the connection within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        made.settimeout(max(0.01, end - time.monotonic()))
        try:
            if not made.recv(65536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def count_closed(sockets, seconds):
    end = time.monotonic() + seconds
    return sum(is_closed(made, max(0.02, end - time.monotonic())) for made in sockets)


@pytest.mark.parametrize("content", [b"", HALF, SLOW_BODY], ids=["silent", "half a header", "half a body"])
def test_half_open_connections_lock_nobody_out_and_are_dropped(runs, short, content):
    with serving(make_app(runs)) as (port, _), opened(port, MANY, content) as sockets:
        for _ in range(5):
            started = time.monotonic()
            assert get(port) == 200
            assert time.monotonic() - started < 10
        assert count_closed(sockets, 15) == MANY
        assert get(port) == 200


def test_without_the_limits_of_these_tests_they_would_be_locked_out(runs, short, monkeypatch):
    """The other way round, so that the test above cannot pass for another reason."""
    monkeypatch.setattr(connections, "PER_CLIENT", 10**6)
    monkeypatch.setattr(connections, "HEADERS", 10**6)
    monkeypatch.setattr(connections, "CONNECTIONS", 10**6)
    with serving(make_app(runs)) as (port, _), opened(port, 5, HALF) as sockets:
        assert count_closed(sockets, 4) == 0


def test_a_client_that_trickles_is_dropped_all_the_same(runs, short):
    """Each byte starts uvicorn's own clock anew."""
    with serving(make_app(runs)) as (port, _), opened(port, 1, HALF) as (made,):
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 15:
                made.sendall(b"a")
                time.sleep(0.2)
        assert time.monotonic() - started < 15


def test_a_body_that_trickles_after_the_answer_is_dropped_all_the_same(runs, short):
    """A page needs no body: it is answered at once, and the rest of the request may not take for ever."""
    content = HALF.replace(b"X-a: ", b"Content-Length: 9999\r\n\r\n")
    with serving(make_app(runs)) as (port, _), opened(port, 1, content) as (made,):
        assert made.recv(20).startswith(b"HTTP/1.1 200")
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 20:
                made.sendall(b"a")
                time.sleep(0.2)
        assert time.monotonic() - started < 20


def test_the_message_says_that_it_took_too_long(runs, short):
    with serving(make_app(runs)) as (port, _), opened(port, 1, HALF) as (made,):
        made.settimeout(15)
        assert made.recv(1000).startswith(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n")


def test_a_client_that_does_not_take_its_answer_is_dropped(short):
    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(300):
            await send({"type": "http.response.body", "body": b"x" * 2**20, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    with serving(large) as (port, held), opened(port, 1, b"") as (made,):
        made.sendall(HALF + b"\r\n\r\n")
        deadline = time.monotonic() + 20
        while not held and time.monotonic() < deadline:
            time.sleep(0.05)
        assert held
        while held and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not held


def test_one_client_cannot_take_the_places_of_another(runs, monkeypatch):
    """Its own oldest connections make room for its new ones."""
    monkeypatch.setattr(connections, "HEADERS", 60.0)
    monkeypatch.setattr(connections, "PER_CLIENT", 10)
    with (
        serving(make_app(runs)) as (port, _),
        opened(port, 8, HALF, source=("127.0.0.2", 0)) as others,
        opened(port, 30, HALF) as sockets,
    ):
        assert get(port) == 200
        assert count_closed(sockets[:20], 10) == 20
        assert count_closed([*sockets[22:], *others], 1) == 0
        assert get(port, source=("127.0.0.2", 0)) == 200
        assert count_closed(others, 1) == 0


def test_all_clients_together_are_limited_and_a_whole_request_is_still_let_in(runs, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS", 60.0)
    monkeypatch.setattr(connections, "CONNECTIONS", 20)
    with (
        serving(make_app(runs)) as (port, _),
        opened(port, 15, HALF, source=("127.0.0.2", 0)) as first,
        opened(port, 15, HALF, source=("127.0.0.3", 0)) as second,
    ):
        assert get(port) == 200
        assert count_closed(first[:10], 10) == 10
        assert count_closed(second, 1) == 0


def test_an_answer_that_is_being_worked_out_keeps_its_place(monkeypatch):
    monkeypatch.setattr(connections, "PER_CLIENT", 3)
    begun = threading.Event()

    async def slow(scope, receive, send):
        begun.set()
        await asyncio.sleep(2)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    with serving(slow) as (port, _), opened(port, 3, HALF + b"\r\n\r\n") as busy:
        assert begun.wait(10)
        time.sleep(0.5)
        with opened(port, 1, b"") as (late,):
            assert late.recv(100).startswith(b"HTTP/1.1 503 Service Unavailable")
        for made in busy:
            assert made.recv(100).startswith(b"HTTP/1.1 200")


def test_a_connection_that_is_kept_serves_several_requests(runs, short):
    with serving(make_app(runs)) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        for _ in range(4):
            connection.request("GET", "/")
            assert connection.getresponse().read()
            time.sleep(1)  # longer in all than the headers of one request may take
        connection.close()


def test_requests_one_after_the_other_without_waiting(runs, short):
    request = b"GET /static/icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with serving(make_app(runs)) as (port, _), opened(port, 1, 2 * request + last) as (made,):
        content = b""
        while part := made.recv(65536):
            content += part
    assert content.count(b"HTTP/1.1 200") == 3


def test_an_upload_that_takes_a_while_is_read(runs, digits, quick, monkeypatch):
    monkeypatch.setattr(connections, "HEADERS", 1.0)
    body = b'{"input": 3}'
    head = (
        b"POST /api/try HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    ) % len(body)
    with serving(make_app(runs, subject=digits)) as (port, _), opened(port, 1, head) as (made,):
        for byte in body:
            made.sendall(bytes([byte]))
            time.sleep(0.25)
        made.settimeout(60)
        assert made.recv(100).startswith(b"HTTP/1.1 200")

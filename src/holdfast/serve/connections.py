"""Connections that do not get on with it: uvicorn waits for them without end, and a hundred of them lock everybody out.

A connection is at one of three things: a request is arriving, a request that has arrived is being answered, or it is
idle between two requests. Each has its time, and there are limits for one client and for all. Where a limit is reached,
the newcomer gets the place of the connection that has been waiting longest for its client. Only an answer that is being
worked out keeps its place: so a whole request is always let in, however many half ones there are.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 100  # of all clients
PER_CLIENT = 50  # of one address; a browser opens six
HEADERS = 5.0  # seconds that the headers of a request may take
WHOLE = 30.0  # seconds that a request may take with its body: longer than the page gives an upload
WRITING = 30.0  # seconds in which a client must take some of an answer that does not fit the buffers
_REASON = {408: b"Request Timeout", 503: b"Service Unavailable"}


class TimedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with limits in number and in time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.since = self.loop.time()
        self._first = True
        self._phase = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn: to send the rest of a request, to send another, or to take an answer."""
        return self._phase != "answer" or self._stuck is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        others = [c for c in self.connections if isinstance(c, TimedProtocol) and c.is_open and c is not self]
        own = [c for c in others if _address(c) == _address(self)]
        if (len(own) >= PER_CLIENT and not _drop_one(own)) or (len(others) >= CONNECTIONS and not _drop_one(others)):
            self.refuse(503)
        else:
            self._watch()

    @property
    def is_open(self) -> bool:
        """Whether it is not closed, and not about to be."""
        return self.transport is not None and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._first = False
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(WRITING, self.transport.abort)
            self.since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._stuck is not None:
            self._stuck.cancel()
        super().connection_lost(exc)

    def refuse(self, status: int) -> None:
        """End the connection; say why if nothing was answered yet."""
        self._stop_clock()
        if self._phase in ("", "headers") and self.is_open:
            self.transport.write(
                b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % (status, _REASON[status])
            )
        self.transport.close()
        # A client that does not take what is left would keep the connection open.
        self.loop.call_later(1.0, self.transport.abort)

    def _watch(self) -> None:
        """Notes what the connection is at, and sets the clock where that has changed."""
        phase = self._what_it_is_at()
        if phase == self._phase:
            return
        # The body has the rest of the time of the whole request.
        left = {"headers": HEADERS, "body": WHOLE - (self.loop.time() - self.since)}.get(phase)
        if phase != "body":
            self.since = self.loop.time()
        self._stop_clock()
        self._phase = phase
        if left is not None and self.is_open:
            self._deadline = self.loop.call_later(max(0.0, left), self.refuse, 408)

    def _what_it_is_at(self) -> str:
        if self.conn.their_state is h11.IDLE:
            return "headers" if self._first or self.conn.trailing_data[0] else "idle"
        return "body" if self.conn.their_state is h11.SEND_BODY else "answer"

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _address(connection: TimedProtocol) -> str | None:
    return connection.client[0] if connection.client else None


def _drop_one(connections: Iterable[TimedProtocol]) -> bool:
    """Drops the connection that has waited longest for its client, if one does."""
    waiting = [connection for connection in connections if connection.waits]
    if waiting:
        min(waiting, key=lambda connection: connection.since).refuse(503)
    return bool(waiting)

"""Requests as a server hands them on, byte by byte, past all that a client would tidy up."""

import asyncio
from urllib.parse import unquote

HOST = (b"host", b"127.0.0.1:8787")


async def never():
    raise AssertionError("the body was read")


def ask(app, method, path, *, query=b"", headers=(), body=b"", receive=None):
    """Status, headers and body of the answer; an exception that leaves the application fails the test."""
    headers = [*headers] if any(name == b"host" for name, _ in headers) else [HOST, *headers]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(errors="replace"),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8787),
    }
    told = []

    async def whole():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        told.append(message)

    asyncio.run(app(scope, receive or whole, send))
    start, *parts = told
    return start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts)

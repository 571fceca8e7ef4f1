"""Who may ask, and what a browser may do with the answer: names, origins, the token, and headers for every answer."""

import hmac
import ipaddress
import re
import socket
from collections.abc import Callable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE, PARAMETER = "holdfast-token", "token"
_COMMON = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " + _COMMON
)
FILE_POLICY = (
    # A report brings its own script and style. The sandbox gives it an origin of its own: it can ask for nothing here.
    "sandbox allow-scripts allow-downloads allow-modals; default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:; " + _COMMON
)
HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.ASCII)


def known_hosts(host: str, *, loopback: bool) -> Callable[[str], bool]:
    """Is a name one that this server goes by? A page elsewhere that points its own name here is not let in.

    On other than loopback addresses every address in digits will do: only names can be made to point elsewhere.
    """
    if loopback:
        return (_LOOPBACK | {host.lower()}).__contains__
    names = _LOOPBACK | {host.lower(), socket.gethostname().lower()}
    return lambda name: name in names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_name(header: str) -> str | None:
    """Name in a Host header, without its port; None if it is no such header.

    >>> host_name("localhost:8787"), host_name("[::1]:8787"), host_name("a b")
    ('localhost', '::1', None)
    """
    found = _HOST.fullmatch(header.lower())
    return None if found is None else found[1] or found[2]


class Shield:
    """Let a request through to `app`, or refuse it; put the security headers on every answer.

    Args:
        known: is a host name one of ours?
        token: needed as ?token= or as cookie; None if everybody who gets here may look.
    """

    def __init__(self, app: ASGIApp, *, known: Callable[[str], bool], token: str | None) -> None:
        self.app, self.known, self.token = app, known, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self.app(scope, receive, send)
            return
        by_address = self._by_address(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if by_address:
                    # The address with the token is for one visit; its cookie stays with the browser only.
                    headers.append("Set-Cookie", f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        refusal = self._refusal(scope, by_address)
        await (self.app if refusal is None else refusal)(scope, receive, answer)

    def _refusal(self, scope: Scope, by_address: bool) -> JSONResponse | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.known(host_name(hosts[0]) or ""):
            return refuse(421, "this server does not go by that name; use the address that 'holdfast serve' printed")
        origin = headers.get("origin")
        if origin is not None and _place(origin) != hosts[0].lower():
            return refuse(403, "a request from another page is not answered")
        if self.token is None or by_address or self._same(cookie_parser(headers.get("cookie", "")).get(COOKIE, "")):
            return None
        return refuse(401, "this page needs a token; open the whole address that 'holdfast serve' printed")

    def _by_address(self, scope: Scope) -> bool:
        """Does the address carry the token?"""
        if self.token is None:
            return False
        values = parse_qs(scope["query_string"].decode("latin-1"), errors="replace").get(PARAMETER, [])
        return len(values) == 1 and self._same(values[0])

    def _same(self, value: str) -> bool:
        """In constant time, so that no answer tells how much of a guess was right."""
        return self.token is not None and hmac.compare_digest(value.encode(errors="replace"), self.token.encode())


def _place(origin: str) -> str | None:
    """Host and port of an Origin header; None if it has none, as on a sandboxed page."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def refuse(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as JSON."""
    return JSONResponse({"error": message}, status, headers)

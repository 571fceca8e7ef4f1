"""The endpoints. Everything is read only: GET, and one POST that computes and keeps nothing."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from holdfast.errors import HoldfastError
from holdfast.serve.listing import FILES, list_runs, read_file
from holdfast.serve.openapi import DOCUMENT
from holdfast.serve.predict import Answer, try_input
from holdfast.serve.shield import FILE_POLICY, Shield, known_hosts, refuse
from holdfast.serve.subjects import Subject, list_models, open_subject
from holdfast.serve.upload import BYTES, FORMATS, TooLarge, read_picture
from holdfast.utils.limits import parse_json
from holdfast.utils.png import is_picture

PAGES = Path(__file__).parent / "pages"
STATIC = {
    "style.css": "text/css; charset=utf-8",
    "common.js": "text/javascript; charset=utf-8",
    "runs.js": "text/javascript; charset=utf-8",
    "curves.js": "text/javascript; charset=utf-8",
    "try.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
SHOWN = 24  # test inputs in one answer
READING, WAITING = 20.0, 60.0  # seconds that an upload and a try may take


def make_app(
    root: Path,
    *,
    subject: Subject | None = None,
    token: str | None = None,
    known: Callable[[str], bool] | None = None,
) -> Starlette:
    """The application, for any ASGI server.

    Args:
        root: folder of the runs.
        subject: a model to try, beside the models of the training runs.
        token: needed to see anything; None for a server that only this machine reaches.
        known: host names that the server goes by; the names of the loopback if not given.
    """
    root, trying = root.resolve(), Lock()

    async def chosen(request: Request) -> Subject:
        """The model that the request names; the first one if it names none."""
        models = await run_in_threadpool(list_models, root, subject)
        name = request.query_params.get("model") or next((model["name"] for model in models), None)
        if name is None:
            raise HTTPException(404, "there is no model to try; start 'holdfast serve' with --model FILE --data NAME")
        try:
            found = await run_in_threadpool(open_subject, root, name, subject)
        except (HoldfastError, OSError, RuntimeError) as error:
            raise HTTPException(409, f"the model cannot be used: {str(error)[:500]}") from error
        if found is None:
            raise HTTPException(404, f"there is no model '{name[:100]}' to try")
        return found

    async def runs(request: Request) -> Response:
        found = await run_in_threadpool(list_runs, root)
        return JSONResponse({"folder": root.name, "runs": [run.to_dict() for run in found]})

    async def models(request: Request) -> Response:
        return JSONResponse({"models": await run_in_threadpool(list_models, root, subject)})

    async def inputs(request: Request) -> Response:
        start = request.query_params.get("start", "0")
        if not re.fullmatch(r"[0-9]{1,9}", start, re.ASCII):
            raise HTTPException(400, f"start must be a position such as 24, got '{start[:100]}'")
        found = await chosen(request)
        return JSONResponse(await run_in_threadpool(found.to_dict, start=int(start), count=SHOWN))

    async def file(request: Request) -> Response:
        name, _, last = request.path_params["path"].rpartition("/")
        content = await run_in_threadpool(read_file, root, name, last)
        if content is None:
            raise HTTPException(404, "there is no such file of a run")
        return Response(content, media_type=FILES[last], headers={"Content-Security-Policy": FILE_POLICY})

    async def try_one(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (*FORMATS, "application/json"):
            raise HTTPException(415, "send a PNG or JPEG picture, or JSON such as {'input': 17}")
        body = await _read_body(request)
        found = await chosen(request)
        norm = request.query_params.get("norm", "linf")
        if not trying.acquire(blocking=False):
            raise HTTPException(503, "another input is being tried; one at a time", {"Retry-After": "2"})
        work = _start(lambda: _try(found, kind, body, norm), trying.release)
        try:
            # The thread cannot be stopped: it goes on, and nothing else is tried until it is done.
            answer = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(work)), WAITING)
        except TimeoutError:
            message = f"this takes more than {WAITING:g} s for this model; look at it with 'holdfast certify'"
            raise HTTPException(503, message, {"Retry-After": "30"}) from None
        except TooLarge as error:
            raise HTTPException(413, str(error)) from error
        except HoldfastError as error:
            raise HTTPException(400, str(error)[:500]) from error
        return JSONResponse(answer)

    async def openapi(request: Request) -> Response:
        return JSONResponse(DOCUMENT)

    pages = {"/": ("index.html", "text/html; charset=utf-8"), "/try": ("try.html", "text/html; charset=utf-8")}
    static = pages | {f"/static/{name}": (name, kind) for name, kind in STATIC.items()}
    routes = [Route(path, _static(PAGES / name, kind)) for path, (name, kind) in static.items()]
    routes += [
        Route("/api/runs", runs),
        Route("/api/models", models),
        Route("/api/inputs", inputs),
        Route("/api/try", try_one, methods=["POST"]),
        Route("/api/openapi.json", openapi),
        Route("/runs/{path:path}", file),
    ]
    hosts = known or known_hosts("127.0.0.1", loopback=True)
    return Starlette(
        routes=routes,
        middleware=[Middleware(Shield, known=hosts, token=token)],
        exception_handlers={HTTPException: _expected, Exception: _unexpected},
    )


def _static(path: Path, kind: str) -> Callable[[Request], Any]:
    content = path.read_bytes()

    async def page(request: Request) -> Response:
        return Response(content, media_type=kind)

    return page


async def _read_body(request: Request) -> bytes:
    """The body, as long as it is short and comes soon; it is never held in memory beyond the limit."""
    refusal = HTTPException(413, f"at most {BYTES:,} bytes are read; send a smaller picture")
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > BYTES):
        raise refusal
    body = bytearray()
    try:
        async with asyncio.timeout(READING):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BYTES:
                    raise refusal
    except TimeoutError:
        raise HTTPException(408, f"the picture did not arrive within {READING:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the picture did not arrive whole") from None
    return bytes(body)


def _try(subject: Subject, kind: str, body: bytes, norm: str) -> Answer:
    if kind == "application/json":
        x, label = subject.input(_position(body))
        return try_input(subject, x, norm=norm, label=label)
    if not is_picture(subject.shape):
        raise HTTPException(400, f"'{subject.name}' takes no pictures; pick one of its test inputs")
    return try_input(subject, read_picture(body, kind, subject.shape), norm=norm)


def _position(body: bytes) -> int:
    """Of a test input, from {"input": 17}."""
    try:
        value = parse_json(body)
    except ValueError:
        value = None
    position = value.get("input") if isinstance(value, dict) and set(value) == {"input"} else None
    if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < 10**9:
        raise HTTPException(400, 'expected JSON such as {"input": 17} with the position of a test input')
    return position


def _start(work: Callable[[], Answer], done: Callable[[], None]) -> Future[Answer]:
    """Run `work`, then `done`, in a thread that does not keep the program from ending."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            done()
            future.set_exception(error)
        else:
            done()
            future.set_result(result)

    Thread(target=run, daemon=True, name="holdfast-try").start()
    return future


async def _expected(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refuse(error.status_code, error.detail, dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> Response:
    return refuse(500, "this should not have happened; the terminal of 'holdfast serve' says more")

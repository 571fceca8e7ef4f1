"""Whatever is asked, in whatever way: no failure of the server, and nothing from beyond the runs in any answer."""

import json
import os

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from holdfast.serve import app as app_module
from holdfast.serve.app import make_app
from holdfast.serve.listing import FILES
from holdfast.serve.openapi import DOCUMENT
from holdfast.serve.shield import COOKIE, HEADERS
from serve.asgi import ask
from serve.made_runs import SECRET

FEW = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
EXPECTED = {200, 307, 400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 503}

names = st.sampled_from(
    ["first", "group", "live", "link", "trained", ".hidden", "elsewhere", "killed", "outside", "api"]
)
files = st.sampled_from(
    [*FILES, "private.txt", "secret.txt", "audit.sqlite", "progress.json", "model.safetensors", "app.py"]
)
odd = st.sampled_from(
    [
        "..",
        ".",
        "",
        "%2e%2e",
        "%2f",
        "%5c",
        "..%2f..",
        "%00",
        "%252e%252e",
        "~",
        "%ff%fe",
        "%ED%A0%80",
        "\\..",
        "a" * 3000,
    ]
)
segments = names | files | odd | st.text(max_size=8)
routes = st.sampled_from(["/", "/try", "/api/runs", "/api/models", "/api/inputs", "/api/try", "/api/openapi.json"])
paths = routes | st.builds(
    lambda first, rest: first + "/".join(rest),
    st.sampled_from(["/runs/", "/static/", "/api/", "/", "//", "/runs//"]),
    st.lists(segments, max_size=6),
)
methods = st.sampled_from(["GET", "GET", "GET", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
queries = st.lists(
    st.tuples(
        st.sampled_from([b"model", b"norm", b"start", b"token", b"x"]),
        st.sampled_from(
            [b"given", b"trained", b"link", b"../outside", b"linf", b"l1", b"7", b"-1", b"1e9", b"9" * 5000, b""]
        )
        | st.binary(max_size=8),
    ).map(b"=".join),
    max_size=3,
).map(b"&".join)
kinds = st.sampled_from(
    [b"image/png", b"image/jpeg", b"application/json", b"text/plain", b"IMAGE/PNG; x=1", b"\xff", b""]
)
header = st.tuples(
    st.sampled_from([b"host", b"origin", b"cookie", b"content-length", b"range", b"accept", b"if-none-match", b"x-a"]),
    st.sampled_from(
        [b"127.0.0.1", b"localhost:1", b"null", b"http://127.0.0.1:8787", b"bytes=0-", COOKIE.encode() + b"=x"]
    )
    | st.binary(max_size=12),
)
bodies = (
    st.binary(max_size=40)
    | st.builds(lambda n: json.dumps({"input": n}).encode(), st.integers(-1, 2001))
    | st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"[" * 5000, b"x" * (2**20 + 1), b'{"input": NaN}'])
)


@pytest.fixture
def app(runs, digits, monkeypatch):
    """What follows the reading of an input has tests of its own, and takes too long here."""
    monkeypatch.setattr(app_module, "try_input", lambda subject, x, norm, label=None: {"shape": list(x.shape)})
    return make_app(runs, subject=digits)


def check(status, headers, body):
    assert status in EXPECTED
    assert SECRET.encode() not in body
    for name in HEADERS:
        assert name.lower().encode() in headers, name
    if status >= 400:
        assert b"Traceback" not in body
        assert headers[b"content-type"] == b"application/json"


@FEW
@given(method=methods, path=paths, query=queries, kind=kinds, more=st.lists(header, max_size=3), body=bodies)
@example("GET", "/runs/first/badge.svg", b"", b"", [], b"")
@example("GET", "/runs/link/report.html", b"", b"", [], b"")
@example("POST", "/api/try", b"model=trained", b"application/json", [], b'{"input": 3}')
def test_any_request(app, method, path, query, kind, more, body):
    headers = [(b"content-type", kind), *more]
    check(*ask(app, method, path, query=query, headers=headers, body=body))


@FEW
@given(path=paths, query=queries, more=st.lists(header, max_size=3))
def test_without_the_token_nothing_is_seen(runs, path, query, more):
    status, headers, body = ask(make_app(runs, token="t" * 20), "GET", path, query=query, headers=more)
    assert status in (401, 403, 421)
    assert b"set-cookie" not in headers
    assert set(json.loads(body)) == {"error"}


def snapshot(folder):
    return {p: (os.lstat(p).st_mtime_ns, os.lstat(p).st_size) for p in sorted(folder.parent.rglob("*"))}


def test_nothing_is_written(app, runs):
    before = snapshot(runs)
    for path, operations in DOCUMENT["paths"].items():
        for method in (*operations, "put", "delete"):
            place = path.replace("{run}", "first").replace("{file}", "report.html")
            check(
                *ask(app, method.upper(), place, headers=[(b"content-type", b"application/json")], body=b'{"input": 1}')
            )
    assert snapshot(runs) == before


@pytest.mark.filterwarnings("ignore")  # those of the generator
def test_requests_made_from_the_document(app):
    """Schemathesis: data that fit the document and data that do not; answers are those that it promises."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(DOCUMENT)

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def run(data):
        operation = data.draw(st.sampled_from([item.ok() for item in schema.get_all_operations()]))
        case = data.draw(operation.as_strategy())
        response = case.call(base_url="http://127.0.0.1:8787", app=app)
        # No schema says which bytes are a picture, or how many test inputs there are.
        case.validate_response(response, excluded_checks=[schemathesis.checks.positive_data_acceptance])
        assert response.status_code in EXPECTED

    run()

"""The endpoints: what they answer, whom they refuse, and that nothing else gets in the way of a look at the runs."""

import asyncio
import io
import itertools
import json
import re
import socket
import sys
import threading
import time
from http.client import HTTPConnection

import pytest
from starlette.testclient import TestClient

from holdfast.errors import InputError, StorageError, UnsupportedError
from holdfast.serve import app as app_module
from holdfast.serve import serve
from holdfast.serve.app import STATIC, make_app
from holdfast.serve.server import address, bind, is_loopback
from holdfast.serve.shield import COOKIE, HEADERS, known_hosts
from holdfast.serve.upload import BYTES
from serve.asgi import ask, never
from serve.made_runs import REPORT, SECRET, progress, write

Image = pytest.importorskip("PIL.Image")
PNG = {"content-type": "image/png"}


def png(side=28):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((side, side)).save(file, "PNG")
    return file.getvalue()


def test_pages_and_their_parts(client):
    for path in ("/", "/try", *(f"/static/{name}" for name in STATIC)):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert answer.content
        for name in re.findall(r'(?:src|href)="(/[^"]*)"', answer.text):
            assert client.get(name).status_code == 200, f"{path} asks for {name}"
    assert "<script>" not in client.get("/").text + client.get("/try").text, "the policy allows no script in the page"


def test_runs_are_live(tmp_path):
    page = TestClient(make_app(tmp_path), base_url="http://localhost")
    assert page.get("/api/runs").json() == {"folder": tmp_path.name, "runs": []}
    for done in (1, 2):
        write(tmp_path / "a" / "progress.json", progress(done=done))
        (run,) = page.get("/api/runs").json()["runs"]
        assert (run["name"], run["state"], run["done"], run["brackets"][0]["certified"]) == ("a", "running", done, 120)


def test_files_of_a_run(client):
    report = client.get("/runs/first/report.html")
    assert report.text == REPORT
    assert report.headers["content-type"] == "text/html; charset=utf-8"
    policy = report.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts ")
    assert "allow-same-origin" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert client.get("/runs/first/results.csv").headers["content-type"] == "text/csv; charset=utf-8"
    assert client.get("/runs/first/audit.json").json()["schema_version"] == 2
    assert client.head("/runs/first/report.html").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/runs/first/badge.svg",
        "/runs/link/report.html",
        "/runs/.hidden/audit.json",
        "/runs/first/private.txt",
        "/runs/first/../../secret.txt",
        "/runs/first/%2e%2e/%2e%2e/secret.txt",
        "/runs/..%2foutside/report.html",
        "/runs/%2fetc/passwd",
        "/runs//etc/passwd",
        "/runs/first%00/report.html",
        "/runs/first/report.html%00",
        "/runs/first%5c..%5c../report.html",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/runs/",
        "/runs",
        "/nothing",
    ],
)
def test_nothing_else_is_there(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}
    assert SECRET not in answer.text


def test_every_answer_has_the_headers(client):
    for method, path in (("GET", "/"), ("GET", "/nothing"), ("PUT", "/api/runs"), ("GET", "/runs/first/report.html")):
        headers = client.request(method, path).headers
        for name, value in HEADERS.items():
            if name != "Content-Security-Policy":
                assert headers[name] == value
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    for policy in ("script-src 'self';", "default-src 'none';"):
        assert policy in client.get("/").headers["Content-Security-Policy"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/runs/first/report.html", "/api/models"])
def test_nothing_can_be_written(client, method, path):
    assert client.request(method, path).status_code == 405


def test_a_test_input_is_tried(client):
    answer = client.post("/api/try?model=given&norm=l2", json={"input": 3})
    assert answer.status_code == 200
    body = answer.json()
    assert body["model"] == "given"
    assert body["norm"] == "l2"
    assert len(body["scores"]) == 10
    assert 0 < body["certified"]["radius"] <= body["adversarial"]["distance"]


def test_a_picture_is_tried_on_the_model_of_a_run(client):
    body = client.post("/api/try?model=trained", content=png(), headers=PNG).json()
    assert body["model"] == "trained"
    assert body["label"] is None
    assert body["attribution"]["picture"]


def test_inputs_to_pick_from(client):
    body = client.get("/api/inputs?start=1990").json()
    assert body["name"] == "given"
    assert body["shape"] == [1, 28, 28]
    assert [row["position"] for row in body["inputs"]] == list(range(1990, 2000))
    assert client.get("/api/inputs?start=5000").json()["inputs"] == []
    assert [model["name"] for model in client.get("/api/models").json()["models"]] == ["given", "trained"]


@pytest.mark.parametrize(
    ("status", "path", "body", "kind"),
    [
        (415, "/api/try", b"GIF89a", "image/gif"),
        (415, "/api/try", b"<svg/>", "image/svg+xml"),
        (415, "/api/try", b"input=1", "application/x-www-form-urlencoded"),
        (415, "/api/try", b"{}", "text/plain"),
        (400, "/api/try", b"no picture", "image/png"),
        (400, "/api/try", b"", "image/jpeg"),
        (400, "/api/try", b"{", "application/json"),
        (400, "/api/try", b"[" * 100_000, "application/json"),
        (400, "/api/try", b'{"input": true}', "application/json"),
        (400, "/api/try", b'{"input": -1}', "application/json"),
        (400, "/api/try", b'{"input": 2000}', "application/json"),
        (400, "/api/try", b'{"input": 1, "more": 2}', "application/json"),
        (400, "/api/try?norm=l7", b'{"input": 1}', "application/json"),
        (404, "/api/try?model=none", b'{"input": 1}', "application/json"),
        (404, "/api/try?model=elsewhere", b'{"input": 1}', "application/json"),
        (413, "/api/try", b"x" * (BYTES + 1), "image/png"),
    ],
)
def test_what_cannot_be_tried_is_refused_with_a_reason(client, status, path, body, kind):
    answer = client.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code == status
    assert len(answer.json()["error"]) > 10
    assert "Traceback" not in answer.text


def test_a_picture_of_too_many_pixels(client):
    file = io.BytesIO()
    Image.new("1", (2001, 2001)).save(file, "PNG")
    assert client.post("/api/try", content=file.getvalue(), headers=PNG).status_code == 413


def test_a_body_without_an_end_is_cut_off(runs, digits):
    """Whatever it says of its length: no more than the limit is ever held."""
    for length in (None, b"5", b"-1", b"nonsense"):
        sent = itertools.count()

        async def endless(sent=sent):
            assert next(sent) < 20
            return {"type": "http.request", "body": b"x" * 2**17, "more_body": True}

        headers = [(b"content-type", b"image/png")] + ([] if length is None else [(b"content-length", length)])
        status, _, body = ask(make_app(runs, subject=digits), "POST", "/api/try", headers=headers, receive=endless)
        assert status == 413
        assert b"bytes are read" in body
        assert next(sent) == 9, "eight parts fit"


def test_a_length_beyond_the_limit_is_refused_unread(runs, digits):
    headers = [(b"content-type", b"image/png"), (b"content-length", b"9" * 30)]
    assert ask(make_app(runs, subject=digits), "POST", "/api/try", headers=headers, receive=never)[0] == 413


def test_a_body_that_does_not_come(runs, digits, monkeypatch):
    monkeypatch.setattr(app_module, "READING", 0.02)

    async def nothing():
        await asyncio.sleep(20)

    async def gone():
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"image/png")]
    for receive, status in ((nothing, 408), (gone, 400)):
        assert ask(make_app(runs, subject=digits), "POST", "/api/try", headers=headers, receive=receive)[0] == status


def test_a_damaged_model_is_no_failure_of_the_server(tmp_path):
    write(tmp_path / "a" / "run.json", {"data": "mnist-mini"})
    write(tmp_path / "a" / "model.safetensors", "not a model")
    page = TestClient(make_app(tmp_path), base_url="http://localhost")
    answer = page.get("/api/inputs?model=a")
    assert answer.status_code == 409
    assert "damaged" in answer.json()["error"]
    assert page.get("/api/inputs?model=b").status_code == 404
    (tmp_path / "a" / "run.json").unlink()
    assert "--model" in page.get("/api/inputs").json()["error"]


def test_one_try_at_a_time_and_the_runs_stay_live(client, monkeypatch):
    begun, end = threading.Event(), threading.Event()

    def slow(*_args, **_how):
        begun.set()
        end.wait(20)
        return {"slow": True}

    monkeypatch.setattr(app_module, "try_input", slow)
    answers = []
    with client:  # one event loop for all requests
        first = threading.Thread(target=lambda: answers.append(client.post("/api/try", json={"input": 1})))
        first.start()
        assert begun.wait(10)
        busy = client.post("/api/try", json={"input": 2})
        assert busy.status_code == 503
        assert busy.headers["retry-after"] == "2"
        assert client.get("/api/runs").status_code == 200
        end.set()
        first.join(10)
        assert answers[0].json() == {"slow": True}
        assert client.post("/api/try", json={"input": 2}).json() == {"slow": True}, "the way is free again"


def test_a_try_has_an_end(client, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(app_module, "WAITING", 0.05)
    monkeypatch.setattr(app_module, "try_input", lambda *_args, **_how: end.wait(20) and {})
    with client:
        late = client.post("/api/try", json={"input": 1})
        assert late.status_code == 503
        assert "holdfast certify" in late.json()["error"]
        assert client.post("/api/try", json={"input": 1}).headers["retry-after"] == "2", "the thread still works"
        end.set()
        for _ in range(100):
            if client.post("/api/try", json={"input": 1}).status_code == 200:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the thread never let go")


def test_a_bug_is_told_without_a_traceback(runs, digits, monkeypatch):
    monkeypatch.setattr(app_module, "list_runs", lambda _: 1 / 0)
    page = TestClient(make_app(runs), base_url="http://localhost", raise_server_exceptions=False)
    answer = page.get("/api/runs")
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("this should not have happened")
    assert "Zero" not in answer.text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost@evil", "", "a b", "[::1", "10.0.0.1"]
)
def test_other_names_are_refused(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8787", "[::1]:8787"])
def test_our_names_are_not(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:8787", 200), ("http://127.0.0.1:9999", 403), ("http://evil.example", 403), ("null", 403)],
)
def test_other_pages_get_no_answer(client, origin, status):
    answer = client.post("/api/try", json={"input": 0}, headers={"origin": origin})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


def test_the_token(runs):
    known = known_hosts("0.0.0.0", loopback=False)
    page = TestClient(make_app(runs, token="right", known=known), base_url="http://10.1.2.3:8787")
    for path in (
        "/",
        "/api/runs",
        "/runs/first/report.html",
        "/nothing",
        "/?token=wrong",
        "/?token=",
        "/?token=right&token=x",
    ):
        answer = page.get(path)
        assert answer.status_code == 401, path
        assert "set-cookie" not in answer.headers
    answer = page.get("/?token=right")
    assert answer.status_code == 200
    cookie = answer.headers["set-cookie"]
    assert cookie == f"{COOKIE}=right; Path=/; HttpOnly; SameSite=Strict"
    assert page.get("/api/runs").status_code == 200, "by the cookie"
    page.cookies.clear()
    for value in (b"righ", b"right2", b"\xff\xfe", b""):
        assert page.get("/api/runs", headers={"cookie": COOKIE.encode() + b"=" + value}).status_code == 401
    assert page.get("/api/runs?token=right", headers={"host": "evil.example"}).status_code == 421


def test_hosts_beyond_this_machine():
    known = known_hosts("box.example", loopback=False)
    assert all(map(known, ("box.example", "192.168.1.5", "::1", "localhost", socket.gethostname().lower())))
    assert not any(map(known, ("evil.example", "", "1.2.3.4.evil.example")))


def test_the_document_names_every_endpoint(client):
    paths = client.get("/api/openapi.json").json()["paths"]
    assert set(paths) == {
        *("/api/runs", "/api/models", "/api/inputs", "/api/try", "/api/openapi.json", "/runs/{run}/{file}"),
    }
    json.dumps(paths, allow_nan=False)


def test_a_real_server(tmp_path):
    """Loopback needs no token; the address is told once; a port that is taken is an error with a way out."""
    write(tmp_path / "a" / "progress.json", progress())
    told, known = [], threading.Event()

    def announce(text):
        told.append(text)
        known.set()

    threading.Thread(target=lambda: serve(tmp_path, port=0, announce=announce), daemon=True).start()
    assert known.wait(10)
    port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", told[0])[1])
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/api/runs")
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("server") is None
    assert json.loads(answer.read())["runs"][0]["name"] == "a"
    connection.close()
    with pytest.raises(InputError, match="another --port"):
        serve(tmp_path, port=port, announce=told.append)
    with pytest.raises(StorageError, match="no folder"):
        serve(tmp_path / "none", announce=told.append)
    assert len(told) == 1


def test_where_it_listens():
    for host, alone in (("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)):
        with bind(host, 0) as bound:
            assert is_loopback(bound) is alone
    assert address("0.0.0.0", 80, "t").endswith(":80/?token=t")


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "holdfast.serve.server", None)
    with pytest.raises(UnsupportedError, match=r"holdfast\[serve\]"):
        serve(tmp_path, announce=print)

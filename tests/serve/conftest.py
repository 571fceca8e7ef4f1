"""The runs and the model that the tests of the page share, and a client for it."""

import pytest

import holdfast as hf
from holdfast.serve.subjects import Subject
from serve.made_runs import fill, small_model


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Only to be read."""
    return fill(tmp_path_factory.mktemp("serve") / "runs")


@pytest.fixture(scope="session")
def digits():
    return Subject("given", small_model(), hf.load_data("mnist-mini"))


@pytest.fixture
def quick(monkeypatch):
    """Short searches."""
    for name, cost in (("STEPS", 20), ("TARGETS", 1), ("TRIES", 2)):
        monkeypatch.setattr(f"holdfast.serve.predict.{name}", cost)


@pytest.fixture
def client(runs, digits, quick):
    from starlette.testclient import TestClient

    from holdfast.serve.app import make_app

    return TestClient(make_app(runs, subject=digits), base_url="http://127.0.0.1:8787")

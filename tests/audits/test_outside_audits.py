"""An audit.json that somebody else wrote: a report, or an error of ours."""

import json

import numpy as np
import pytest

from audit_makers import TRUST, make
from clock import within
from holdfast.audits import load_audit, render
from holdfast.errors import StorageError

VALUES = (None, 0, -1, 10**15, 1e300, -0.5, "x", "<b>`$(x)`\n", True, [], [[]], {}, {"a": [1]})
WRONG = {
    "name": 1,
    "data": None,
    "settings": [],
    "groups": {"source": ["a"]},
    "versions": "1.0",
    "hashes": None,
    "classes": "zero",
    "brackets": [],
}


@pytest.fixture
def saved(tmp_path):
    audit = make(trust=TRUST, groups={"source": tuple("ab" * 5)})
    audit.save(tmp_path)
    return tmp_path, json.loads((tmp_path / "audit.json").read_text())


def places(value, path=()):
    """Every place in a JSON value, one of each kind of row."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def changed(body, path, value):
    body = json.loads(json.dumps(body))
    part = body
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return body


@pytest.mark.filterwarnings("ignore:.*divide:RuntimeWarning")
def test_every_value_changed_to_something_else_gives_a_report_or_a_storage_error(saved):
    folder, body = saved
    body["settings"]["alpha"] = 0.001
    (folder / "examples-0.npz").unlink()
    refused = 0
    for path in [p for p in places(body) if p]:
        for value in VALUES:
            (folder / "audit.json").write_text(json.dumps(changed(body, path, value)))
            with within(10):
                try:
                    page = render([load_audit(folder)])
                except StorageError:
                    refused += 1
                else:
                    assert "</html>" in page
    assert refused > 500


@pytest.mark.parametrize("key", WRONG)
def test_wrong_kinds_are_named(saved, key):
    folder, body = saved
    (folder / "audit.json").write_text(json.dumps({**body, key: WRONG[key]}))
    with pytest.raises(StorageError, match="is not a complete audit"):
        load_audit(folder)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"schema_version": 2, "schema_version": 2}', "NaN"]
)
def test_texts_that_are_no_plain_values(saved, text):
    folder, _ = saved
    (folder / "audit.json").write_text(text)
    with within(10), pytest.raises(StorageError, match="run the audit again"):
        load_audit(folder)


def test_pictures_that_are_none(saved):
    folder, _ = saved
    whole = (folder / "examples-0.npz").read_bytes()
    for content in (b"", whole[:100], b"PK" + whole[2:-50]):
        (folder / "examples-0.npz").write_bytes(content)
        with within(10), pytest.raises(StorageError, match="go without pictures"):
            load_audit(folder)
    np.savez(folder / "examples-0.npz", x_a=np.zeros(3))
    with pytest.raises(StorageError, match="go without pictures"):
        load_audit(folder)

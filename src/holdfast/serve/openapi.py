"""The endpoints as an OpenAPI document, for clients and for tests that make requests from it."""

from typing import Any

from holdfast.attacks.core.minimum_norm import BALLS
from holdfast.serve.listing import FILES
from holdfast.serve.upload import BYTES, FORMATS

Schema = dict[str, Any]

_ERROR: Schema = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_OBJECT: Schema = {"type": "object"}
_TEXT: Schema = {"type": "string"}


def _answers(summary: str, kinds: dict[str, Schema], *errors: int) -> Schema:
    """An operation's answers: what it gives, and the errors it has beside the errors of every operation."""
    always = {401: "no token", 403: "from another page", 421: "not a name of this server"}
    known = always | {
        400: "a value that cannot be used",
        404: "there is none",
        408: "the body took too long",
        409: "the model cannot be used",
        413: "too large",
        415: "a type that is not read",
        503: "busy, or too slow; see Retry-After",
    }
    refusals = {
        str(code): {"description": known[code], "content": {"application/json": {"schema": _ERROR}}}
        for code in (*always, *errors)
    }
    content = {kind: {"schema": schema} for kind, schema in kinds.items()}
    return {"summary": summary, "responses": {"200": {"description": summary, "content": content}, **refusals}}


def _parameter(name: str, schema: Schema, text: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


_MODEL = _parameter("model", _TEXT, "a name of /api/models; the first one if not given")
_NORM = _parameter("norm", {"type": "string", "enum": list(BALLS), "default": "linf"}, "of the perturbations")
_START = _parameter("start", {"type": "integer", "minimum": 0, "maximum": 999_999_999, "default": 0}, "first position")
_PICK: Schema = {
    "type": "object",
    "required": ["input"],
    "additionalProperties": False,
    "properties": {"input": {"type": "integer", "minimum": 0, "maximum": 999_999_999}},
}
_BODY: Schema = {
    "required": True,
    "description": f"a test input by its position, or a picture of at most {BYTES} bytes",
    "content": {
        "application/json": {"schema": _PICK},
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in FORMATS},
    },
}
_JSON = {"application/json": _OBJECT}
_FILE_PARAMETERS: list[Schema] = [
    {"name": "run", "in": "path", "required": True, "description": "a name of /api/runs", "schema": _TEXT},
    {"name": "file", "in": "path", "required": True, "schema": {"type": "string", "enum": list(FILES)}},
]
_FILE_KINDS: dict[str, Schema] = {kind.partition(";")[0]: {} for kind in FILES.values()}

DOCUMENT: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "Holdfast: a page to look around", "version": "1"},
    "paths": {
        "/api/runs": {"get": _answers("all runs, with their progress and their bracket so far", _JSON)},
        "/api/models": {"get": _answers("models that can be tried", _JSON)},
        "/api/inputs": {
            "get": _answers("a model's shape and classes, and some of its test inputs", _JSON, 400, 404, 409)
            | {"parameters": [_MODEL, _START]}
        },
        "/api/try": {
            "post": _answers("all about one input", _JSON, 400, 404, 408, 409, 413, 415, 503)
            | {"parameters": [_MODEL, _NORM], "requestBody": _BODY}
        },
        "/api/openapi.json": {"get": _answers("this document", _JSON)},
        "/runs/{run}/{file}": {"get": _answers("a file of a run", _FILE_KINDS, 404) | {"parameters": _FILE_PARAMETERS}},
    },
}

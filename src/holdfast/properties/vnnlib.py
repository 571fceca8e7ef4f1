"""Read properties from VNN-LIB files: version 1.0 here, version 2.0 through the package of its authors.

A file of version 1.0 declares the inputs X_0, X_1, ... and the outputs Y_0, ..., and asserts what a counter-example
meets. Bounds of single inputs make up most of a file; they are read by one regular expression, the rest token by token.
"""

import bisect
import gzip
import re
from pathlib import Path

from holdfast.errors import InputError, StorageError
from holdfast.properties.logic import And, Atom, Ends, Formula, Or, Variable, to_property
from holdfast.properties.property import Property
from holdfast.properties.vnnlib2 import read_version_2

_COMMENT = re.compile(r";[^\n]*")
_DECLARATION = re.compile(r"\([ \t]*declare-(?:const|fun)[ \t]+([XY])_(\d+)(?:[ \t]*\([ \t]*\))?[ \t]+Real[ \t]*\)")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_BOUND = re.compile(rf"\([ \t]*assert[ \t]*\([ \t]*([<>]=)[ \t]+X_(\d+)[ \t]+({_NUMBER})[ \t]*\)[ \t]*\)")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_VERSION_2 = re.compile(r"\(\s*(?:vnnlib-version|declare-network)\b")
_VARIABLE = re.compile(r"([XY])_(\d+)")
_DEEPEST = 200


def load_property(path: str | Path) -> Property:
    """Read a property from a VNN-LIB file, plain or compressed (.gz).

    Raises:
        InputError: the file is malformed; the message names line and token.
        UnsupportedError: a condition has no rule, or version 2.0 needs the package `vnnlib`.
        StorageError: the file cannot be read.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise StorageError(f"'{file}' cannot be read: {error}") from error
    return parse_property(text, file.name)


def parse_property(text: str, name: str = "property") -> Property:
    """The property that a VNN-LIB text describes; errors begin with `name`."""
    text = _COMMENT.sub("", text)
    if _VERSION_2.search(text):
        return read_version_2(text, name)
    counts = {"X": -1, "Y": -1}
    declared = {"X": set[int](), "Y": set[int]()}
    for kind, number in _DECLARATION.findall(text):
        declared[kind].add(int(number))
    for kind, numbers in declared.items():
        counts[kind] = len(numbers)
        missing = next((i for i in range(len(numbers)) if i not in numbers), None)
        if missing is not None:
            raise InputError(f"{name}: {kind}_{max(numbers)} is declared, {kind}_{missing} is not")
    if not counts["X"] or not counts["Y"]:
        raise InputError(f"{name}: no {'inputs X_0' if not counts['X'] else 'outputs Y_0'}, ... are declared")
    ends = _bounds(text, counts["X"], name)
    rest = _BOUND.sub("", _DECLARATION.sub("", text))
    formulas = _Reader(rest, name, counts).asserted()
    return to_property(formulas, ends, counts["X"], counts["Y"], name)


def _bounds(text: str, inputs: int, name: str) -> Ends:
    """The bounds that are asserted of single inputs."""
    ends = Ends()
    for sign, number, value in _BOUND.findall(text):
        index, bound = int(number), float(value)
        if index >= inputs:
            at = next(m for m in _BOUND.finditer(text) if m.group(2) == number)
            raise InputError(f"{name}, line {_line(text, at.start())}: 'X_{number}' is not declared")
        ends.tighten(index, bound if sign == ">=" else None, bound if sign == "<=" else None)
    return ends


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


class _Reader:
    """Reads what is asserted, token by token, and knows the line of each."""

    def __init__(self, text: str, name: str, counts: dict[str, int]) -> None:
        self.name, self.counts = name, counts
        self.tokens = [(m.group(), m.start()) for m in _TOKEN.finditer(text)]
        self.breaks = [m.start() for m in re.finditer("\n", text)]
        self.at = 0

    def asserted(self) -> list[Formula]:
        formulas = []
        while self.at < len(self.tokens):
            self.expect("(")
            word = self.next("assert or declare-const")
            if word != "assert":
                raise self.error(f"unknown command '{word}'; expected assert, or a declaration X_0 or Y_0 of type Real")
            formulas.append(self.formula(0))
            self.expect(")")
        return formulas

    def formula(self, depth: int) -> Formula:
        self.expect("(")
        word, start = self.next("<=, >=, =, and, or"), self.at
        if depth > _DEEPEST:
            raise self.error(f"conditions are nested more than {_DEEPEST} deep")
        if word in ("and", "or"):
            parts = []
            while self.peek() == "(":
                parts.append(self.formula(depth + 1))
            if not parts:
                raise self.error(f"'{word}' without conditions")
            self.expect(")")
            return And(tuple(parts)) if word == "and" else Or(tuple(parts))
        if word in ("<", ">", "not", "!=", "=>"):
            raise self.error(f"'{word}' is not part of VNN-LIB 1.0: its conditions are <= and >=", start - 1)
        if word not in ("<=", ">=", "="):
            raise self.error(f"unknown condition '{word}'; expected <=, >=, =, and, or", start - 1)
        left, right = self.term(0), self.term(0)
        self.expect(")")
        where = f"{self.name}, line {self.line(start)}"
        less, more = _atom(left, right, where), _atom(right, left, where)
        return And((less, more)) if word == "=" else less if word == "<=" else more

    def term(self, depth: int) -> dict[Variable | None, float]:
        """A linear term: factors by variable, and the constant under None."""
        if depth > _DEEPEST:
            raise self.error(f"terms are nested more than {_DEEPEST} deep")
        token = self.next("a variable or a number")
        if token == "(":
            word, start = self.next("+, -, *"), self.at - 1
            parts = []
            while self.peek() != ")":
                parts.append(self.term(depth + 1))
            self.expect(")")
            return self.combine(word, parts, start)
        found = _VARIABLE.fullmatch(token)
        if found:
            kind, number = found.group(1), int(found.group(2))
            if number >= self.counts[kind]:
                raise self.error(f"'{token}' is not declared; there are {self.counts[kind]} of {kind}", self.at - 1)
            return {(kind, number): 1.0}
        if re.fullmatch(_NUMBER, token):
            return {None: float(token)}
        raise self.error(f"'{token}' is no variable and no number", self.at - 1)

    def combine(self, word: str, parts: list[dict[Variable | None, float]], start: int) -> dict[Variable | None, float]:
        if word not in ("+", "-", "*") or not parts:
            raise self.error(f"unknown term '{word}'; expected +, -, * with operands", start)
        if word == "*":
            constants = [p for p in parts if set(p) <= {None}]
            if len(constants) < len(parts) - 1:
                raise self.error("a product of two variables; conditions must be linear", start)
            factor = 1.0
            for part in constants:
                factor *= part.get(None, 0.0)
            linear = next((p for p in parts if set(p) - {None}), {None: 1.0})
            return {key: factor * value for key, value in linear.items()}
        total: dict[Variable | None, float] = {}
        for i, part in enumerate(parts):
            sign = -1.0 if word == "-" and (i or len(parts) == 1) else 1.0
            for key, value in part.items():
                total[key] = total.get(key, 0.0) + sign * value
        return total

    def peek(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def next(self, expected: str) -> str:
        if self.at == len(self.tokens):
            raise InputError(f"{self.name}: the file ends early; expected {expected}")
        self.at += 1
        return self.tokens[self.at - 1][0]

    def expect(self, token: str) -> None:
        found = self.next(f"'{token}'")
        if found != token:
            raise self.error(f"expected '{token}', got '{found}'", self.at - 1)

    def line(self, index: int) -> int:
        return bisect.bisect_left(self.breaks, self.tokens[min(index, len(self.tokens) - 1)][1]) + 1

    def error(self, why: str, index: int | None = None) -> InputError:
        return InputError(f"{self.name}, line {self.line(self.at - 1 if index is None else index)}: {why}")


def _atom(left: dict[Variable | None, float], right: dict[Variable | None, float], where: str) -> Atom:
    """left <= right."""
    factors = {key: left.get(key, 0.0) - right.get(key, 0.0) for key in (*left, *right) if key is not None}
    limit = right.get(None, 0.0) - left.get(None, 0.0)
    return Atom(tuple((key, value) for key, value in factors.items() if value), limit, where)

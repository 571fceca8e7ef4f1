"""VNN-LIB 2.0, parsed and type-checked by the package `vnnlib` of its authors."""

import json
import math
from typing import Any

from holdfast.errors import InputError, UnsupportedError
from holdfast.properties.logic import And, Atom, Ends, Formula, Or, Variable, to_property
from holdfast.properties.property import Property


def read_version_2(text: str, name: str) -> Property:
    """The property of a VNN-LIB 2.0 text about one network with one input and one output.

    Raises:
        UnsupportedError: the package is not installed, or the text speaks of several networks, of values inside the
            network, or of strict conditions.
        InputError: the text is malformed.
    """
    try:
        import vnnlib
    except ImportError:
        raise UnsupportedError(
            f"{name} is VNN-LIB 2.0, which needs the package vnnlib: pip install 'holdfast[vnnlib]'"
        ) from None
    try:
        query = vnnlib.parse_query_string(text)
    except Exception as error:  # syntax, types and encodings each have an error of their own
        raise InputError(f"{name}{_told(str(error))}") from error
    if len(query.networks) != 1:
        raise UnsupportedError(f"{name} speaks of {len(query.networks)} networks; one can be verified at a time")
    network = query.networks[0]
    if len(network.inputs) != 1 or len(network.outputs) != 1 or network.hidden:
        raise UnsupportedError(
            f"{name} declares {len(network.inputs)} inputs, {len(network.outputs)} outputs and {len(network.hidden)} "
            "values inside the network; expected one input, one output, nothing inside"
        )
    shapes = {"X": list(network.inputs[0].shape), "Y": list(network.outputs[0].shape)}
    names = {network.inputs[0].name: "X", network.outputs[0].name: "Y"}
    reader = _Reader(vnnlib, name, names, shapes)
    formulas = [reader.formula(assertion.expr) for assertion in query.assertions]
    sizes = {kind: math.prod(shape) for kind, shape in shapes.items()}
    return to_property(formulas, Ends(), sizes["X"], sizes["Y"], name)


def _told(report: str) -> str:
    """What the package reports, in a line: errors of types come as JSON, with a line number and a symbol each."""
    try:
        first = json.loads(report)["errors"][0]
        return f", line {first['line']}: {first['message']} '{first['offendingSymbol']}'"
    except (ValueError, LookupError, TypeError):
        return f": {report}"


class _Reader:
    """From the syntax tree of the package to our formulas."""

    def __init__(self, package: Any, name: str, names: dict[str, str], shapes: dict[str, list[int]]) -> None:
        self.package, self.name, self.names, self.shapes = package, name, names, shapes

    def formula(self, node: Any) -> Formula:
        p = self.package
        if isinstance(node, p.And | p.Or):
            parts = tuple(self.formula(part) for part in node.args)
            return And(parts) if isinstance(node, p.And) else Or(parts)
        if not isinstance(node, p.LessEqual | p.GreaterEqual | p.Equal):
            raise UnsupportedError(f"{self.name}: the condition '{node}' is strict; only <=, >= and == have a rule")
        less, more = self.atom(node, 1.0), self.atom(node, -1.0)
        return And((less, more)) if isinstance(node, p.Equal) else less if isinstance(node, p.LessEqual) else more

    def atom(self, node: Any, sign: float) -> Atom:
        """sign * (lhs - rhs) <= 0."""
        factors: dict[Variable, float] = {}
        limit = 0.0
        for side, part in ((sign, node.lhs.to_linear_expr()), (-sign, node.rhs.to_linear_expr())):
            limit -= side * part.constant
            for term in part.terms:
                key = self.variable(term.var)
                factors[key] = factors.get(key, 0.0) + side * term.coeff
        return Atom(tuple((key, value) for key, value in factors.items() if value), limit, f"{self.name}: '{node}'")

    def variable(self, var: Any) -> Variable:
        kind, index = self.names[var.name], 0
        for size, i in zip(self.shapes[kind], var.indices, strict=True):
            index = index * size + int(i)
        return kind, index

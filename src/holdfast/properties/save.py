"""Write properties as VNN-LIB 1.0."""

import gzip
from pathlib import Path

from holdfast.errors import UnsupportedError
from holdfast.properties.property import Case, Polytope, Property
from holdfast.utils.files import write_bytes


def save_property(prop: Property, path: str | Path) -> Path:
    """Write a property as VNN-LIB 1.0, compressed if the name ends in .gz; returns the path.

    Raises:
        UnsupportedError: a case is a ball, which VNN-LIB cannot say.
    """
    file, data = Path(path), to_vnnlib(prop).encode()
    write_bytes(file, gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)
    return file


def to_vnnlib(prop: Property) -> str:
    """The property as VNN-LIB 1.0; numbers are read back bit by bit."""
    if any(case.ball is not None for case in prop.cases):
        raise UnsupportedError("VNN-LIB 1.0 has boxes of inputs, no balls")
    lines = [f"(declare-const X_{i} Real)" for i in range(prop.inputs)]
    lines += [f"(declare-const Y_{i} Real)" for i in range(prop.outputs or 1)]
    if len(prop.cases) == 1:
        case = prop.cases[0]
        lines += [f"(assert {bound})" for bound in _box(case)]
        alternatives = [_rows(polytope) for polytope in case.unsafe]
    else:
        alternatives = [_box(case) + _rows(polytope) for case in prop.cases for polytope in case.unsafe]
    if all(alternatives):
        lines.append("(assert (or")
        lines += [f"    (and {' '.join(conditions)})" for conditions in alternatives]
        lines.append("))")
    return "\n".join(lines) + "\n"


def _box(case: Case) -> list[str]:
    ends = enumerate(zip(case.lower.tolist(), case.upper.tolist(), strict=True))
    return [text for i, (low, high) in ends for text in (f"(>= X_{i} {low!r})", f"(<= X_{i} {high!r})")]


def _rows(polytope: Polytope) -> list[str]:
    return [
        f"(<= {_sum(row)} {limit!r})"
        for row, limit in zip(polytope.rows.tolist(), polytope.limits.tolist(), strict=True)
    ]


def _sum(row: list[float]) -> str:
    terms = [f"Y_{i}" if factor == 1 else f"(* {factor!r} Y_{i})" for i, factor in enumerate(row) if factor]
    return terms[0] if len(terms) == 1 else f"(+ {' '.join(terms)})" if terms else "0.0"

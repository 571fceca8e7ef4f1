"""A piecewise linear network as a mixed-integer program: one column for every value, one binary for every open choice.

Affine layers and additions give equalities that all inputs of a batch share (`skeleton`); what an activation or a
maximum contributes depends on the bounds of its input, so it is written for each input (`program`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch.nn import functional as F

from holdfast.bounding.core.rounding import underflow, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

U, TINY = unit(torch.float64), underflow(0, torch.float64)


class Rows:
    """Collects rows lower <= sum of coefficient * column <= upper, many at a time, and hands out columns."""

    def __init__(self, columns: int) -> None:
        self.columns, self.count = columns, 0
        self.entries: list[tuple[Indices, Indices, Floats]] = []
        self.lower: list[Floats] = []
        self.upper: list[Floats] = []

    def new_columns(self, count: int) -> Indices:
        """Indices of columns that did not exist before, (count,)."""
        self.columns += count
        return np.arange(self.columns - count, self.columns)

    def add(self, *terms: tuple[Indices, Floats | float], lower: Floats | float, upper: Floats | float) -> None:
        """n rows: every term is a pair of columns (n,) and coefficients (n,) or one for all."""
        count = len(terms[0][0])
        rows = np.arange(self.count, self.count + count)
        for columns, coefficients in terms:
            self.entries.append((rows, columns, np.broadcast_to(np.float64(coefficients), count)))
        self._close(count, lower, upper)

    def add_matrix(self, out: Indices, matrix: sparse.coo_array, columns: Indices, bias: Floats) -> None:
        """The rows out - matrix @ columns = bias."""
        self.entries.append((self.count + matrix.row.astype(np.int64), columns[matrix.col], -matrix.data))
        self.add((out, 1.0), lower=bias, upper=bias)

    def _close(self, count: int, lower: Floats | float, upper: Floats | float) -> None:
        self.lower.append(np.broadcast_to(np.float64(lower), count))
        self.upper.append(np.broadcast_to(np.float64(upper), count))
        self.count += count

    def matrix(self) -> sparse.csr_array:
        """All rows so far, (rows, columns)."""
        row, column, value = (
            np.concatenate([e[i] for e in self.entries]) if self.entries else np.empty(0) for i in range(3)
        )
        matrix = sparse.csr_array((value, (row, column)), shape=(self.count, self.columns))
        matrix.eliminate_zeros()
        return matrix


@dataclass(frozen=True, eq=False)
class Skeleton:
    """What all inputs share: the columns of every node's values (in the node's shape), and the linear equalities."""

    graph: Graph
    columns: tuple[Indices, ...]
    width: int
    matrix: sparse.csr_array
    rhs: Floats


@dataclass(frozen=True, eq=False)
class Program:
    """One input's program: `lower <= matrix @ v <= upper`, `v` within `floor` and `ceiling`, some of it integer."""

    matrix: sparse.csr_array
    lower: Floats
    upper: Floats
    floor: Floats
    ceiling: Floats
    integer: Mask

    @property
    def binaries(self) -> int:
        """Number of integer columns: zero-one choices that the bounds leave open."""
        return int(self.integer.sum())


def skeleton(graph: Graph) -> Skeleton:
    """Columns for all values, and the equalities of affine layers and additions."""
    rows = Rows(0)
    columns: list[Indices] = []
    for node in graph.nodes:
        given = [columns[i] for i in node.inputs]
        match node.op:
            case ops.Reshape():
                columns.append(given[0].reshape(node.shape))
            case ops.Concat():
                columns.append(np.concatenate(given, node.op.dim - 1))
            case _:
                columns.append(rows.new_columns(int(np.prod(node.shape))).reshape(node.shape))
        if isinstance(node.op, ops.Affine):
            matrix, bias = affine_matrix(node.op, graph.nodes[node.inputs[0]].shape, node.shape)
            rows.add_matrix(columns[-1].ravel(), matrix, given[0].ravel(), bias)
        elif isinstance(node.op, ops.Add):
            rows.add((columns[-1].ravel(), 1.0), *((c.ravel(), -1.0) for c in given), lower=0.0, upper=0.0)
    rhs = np.concatenate(rows.lower) if rows.lower else np.empty(0)
    return Skeleton(graph, tuple(columns), rows.columns, rows.matrix(), rhs)


def affine_matrix(op: ops.Affine, before: ops.Shape, after: ops.Shape) -> tuple[sparse.coo_array, Floats]:
    """A (outputs, inputs), sparse, and b (outputs,) of an affine operation between values of these shapes."""
    like = op.apply(torch.zeros(1, *before, dtype=torch.float64))
    bias = like.flatten().numpy()
    if isinstance(op, ops.Conv):
        return _convolution(op, after), bias
    count, size = int(np.prod(after)), int(np.prod(before))
    parts = []
    for first in range(0, count, chunk := max(1, 2**22 // size)):
        units = torch.zeros(min(chunk, count - first), count, dtype=torch.float64)
        units[:, first:].fill_diagonal_(1.0)
        parts.append(sparse.coo_array(op.transpose(units.view(-1, *after)).reshape(len(units), size).numpy()))
    return sparse.vstack(parts, format="coo"), bias


def _windows(shape: ops.Shape, op: ops.Conv | ops.MaxPool, kernel: tuple[int, int], after: ops.Shape) -> Indices:
    """Which value of a (C, H, W) map each place of each window sees: (C, kernel places, windows), -1 in the padding."""
    channels, height, width = shape
    # One more than the index, as float64 (exact), so that the zeros of the padding stand out.
    index = torch.arange(1, channels * height * width + 1, dtype=torch.float64).view(1, *shape)
    # A window of ceil_mode may reach beyond the padding: make room for it, and drop what is too much.
    reach = [op.padding[i] + op.stride[i] + op.dilation[i] * (kernel[i] - 1) for i in range(2)]
    padded = F.pad(index, (op.padding[1], reach[1], op.padding[0], reach[0]))
    places = F.unfold(padded, kernel, op.dilation, 0, op.stride)
    across = (padded.shape[3] - op.dilation[1] * (kernel[1] - 1) - 1) // op.stride[1] + 1
    places = places.view(channels, kernel[0] * kernel[1], -1, across)[:, :, : after[1], : after[2]]
    found: Indices = places.flatten(2).long().numpy() - 1
    return found


def _convolution(op: ops.Conv, after: ops.Shape) -> sparse.coo_array:
    """The matrix of a convolution; only the entries that a kernel touches are ever built."""
    kernel = (int(op.weight.shape[2]), int(op.weight.shape[3]))
    seen = _windows(op.in_shape, op, kernel, after)
    seen = seen.reshape(op.groups, 1, -1, seen.shape[2])  # (group, 1, channel and place, window)
    weight = op.weight.detach().numpy().reshape(op.groups, -1, seen.shape[2], 1)
    outputs = np.arange(int(np.prod(after))).reshape(op.groups, -1, 1, seen.shape[3])
    row, column, value = np.broadcast_arrays(outputs, seen, weight)
    inside = (column >= 0) & (value != 0)
    shape = (int(np.prod(after)), int(np.prod(op.in_shape)))
    return sparse.coo_array((value[inside], (row[inside], column[inside])), shape=shape)


def program(base: Skeleton, intervals: list[tuple[Floats, Floats]]) -> Program:
    """The program of one input, from bounds of every node over its threat set, in the node's shape.

    Args:
        base: the network.
        intervals: lower and upper bound of each node; the first one is the input box.
    """
    floor, ceiling = np.full(base.width, -np.inf), np.full(base.width, np.inf)
    for columns, (low, high) in zip(base.columns, intervals, strict=True):
        np.maximum.at(floor, columns.ravel(), low.ravel())
        np.minimum.at(ceiling, columns.ravel(), high.ravel())
    rows = Rows(base.width)
    for node, out in zip(base.graph.nodes, base.columns, strict=True):
        if isinstance(node.op, ops.Activation | ops.MaxPool | ops.MinMax):
            _encode(rows, node, base.columns[node.inputs[0]], out, *intervals[node.inputs[0]])
    spare = rows.columns - base.width
    shared = base.matrix.copy()
    shared.resize(base.matrix.shape[0], rows.columns)
    return Program(
        sparse.vstack([shared, rows.matrix()], format="csr"),
        np.concatenate([base.rhs, *rows.lower]),
        np.concatenate([base.rhs, *rows.upper]),
        np.concatenate([floor, np.zeros(spare)]),
        np.concatenate([ceiling, np.ones(spare)]),
        np.arange(rows.columns) >= base.width,
    )


def _encode(rows: Rows, node: Node, given: Indices, out: Indices, lower: Floats, upper: Floats) -> None:
    """The rows of one non-linear node; `given` and `out` are the columns of its input and output."""
    match node.op:
        case ops.Activation():
            _piecewise(rows, node.op.parameter, given.ravel(), out.ravel(), lower.ravel(), upper.ravel())
        case ops.MaxPool():
            seen = _windows(given.shape, node.op, node.op.kernel, node.shape)
            seen = seen.swapaxes(1, 2).reshape(-1, seen.shape[1])
            _maximum(rows, given.ravel(), seen, out.ravel(), lower.ravel(), upper.ravel())
        case _:  # MinMax: (2i, 2i + 1) becomes (max, min), and both add up to what they were
            index = np.arange(given.size).reshape(given.shape)
            pairs = np.stack([index[0::2].ravel(), index[1::2].ravel()], 1)
            _maximum(rows, given.ravel(), pairs, out[0::2].ravel(), lower.ravel(), upper.ravel())
            taken = [(given.ravel()[pairs[:, i]], -1.0) for i in range(2)]
            rows.add((out[0::2].ravel(), 1.0), (out[1::2].ravel(), 1.0), *taken, lower=0.0, upper=0.0)


def _piecewise(rows: Rows, slope: float, z: Indices, v: Indices, lower: Floats, upper: Floats) -> None:
    """v = max(z, slope z) with 0 <= slope <= 1; ReLU is slope 0. With s = 1 where z is positive:

    v >= z,  v >= slope z,  v <= slope z + (1 - slope) u s,  v <= z - (1 - slope) l (1 - s).
    """
    fixed = (lower >= 0) | (upper <= 0)
    rows.add((v[fixed], 1.0), (z[fixed], -np.where(lower[fixed] >= 0, 1.0, slope)), lower=0.0, upper=0.0)
    z, v = z[~fixed], v[~fixed]
    low, high = (_away_from_zero((1 - slope) * bound[~fixed]) for bound in (lower, upper))
    s = rows.new_columns(len(z))
    rows.add((v, 1.0), (z, -1.0), lower=0.0, upper=np.inf)
    rows.add((v, 1.0), (z, -slope), lower=0.0, upper=np.inf)
    rows.add((v, 1.0), (z, -slope), (s, -high), lower=-np.inf, upper=0.0)
    rows.add((v, 1.0), (z, -1.0), (s, -low), lower=-np.inf, upper=-low)


def _maximum(rows: Rows, z: Indices, seen: Indices, v: Indices, lower: Floats, upper: Floats) -> None:
    """v[n] = the largest of z[seen[n]], where seen is (n, places), -1 for nothing. With one s for every candidate i:

    v >= z_i,  v <= z_i + (U_i - l_i) (1 - s_i),  sum s_i >= 1, where U_i is the largest upper bound of the others.
    """
    low, high = (np.where(seen >= 0, bound[seen], -np.inf) for bound in (lower, upper))
    # What cannot exceed the largest lower bound is never needed; the value that has this lower bound always is.
    alive = high > low.max(1, keepdims=True)
    alive[np.arange(len(seen)), low.argmax(1)] = True
    single = alive.sum(1) == 1
    rows.add((v[single], 1.0), (z[seen[single, low[single].argmax(1)]], -1.0), lower=0.0, upper=0.0)
    window, place = np.nonzero(alive & ~single[:, None])
    top, chosen = v[window], z[seen[window, place]]
    peaks = np.where(alive, high, -np.inf)
    first, second = peaks.argmax(1)[window], np.sort(peaks, 1)[:, -2:][window, 0]
    slack = _away_from_zero(np.where(place == first, second, peaks.max(1)[window]) - low[window, place])
    s = rows.new_columns(len(window))
    rows.add((top, 1.0), (chosen, -1.0), lower=0.0, upper=np.inf)
    rows.add((top, 1.0), (chosen, -1.0), (s, slack), lower=-np.inf, upper=slack)
    choice = np.zeros(seen.shape, dtype=np.int64)
    choice[window, place] = s
    open_ = np.flatnonzero(~single)
    terms = [(choice[open_, i], alive[open_, i].astype(np.float64)) for i in range(seen.shape[1])]
    rows.add(*terms, lower=1.0, upper=np.inf)


def _away_from_zero(value: Floats) -> Floats:
    """Enlarges the result of two operations by more than their rounding, so that rows with it are only loosened."""
    return value + np.copysign(8 * U * np.abs(value) + TINY, value)

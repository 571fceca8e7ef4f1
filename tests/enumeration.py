"""The exact smallest margin of a small network, pattern by pattern."""

import itertools

import numpy as np
from scipy.optimize import linprog


def by_enumeration(layers, lower, upper, y, slope=0.0):
    """Smallest margin of an MLP [(W, b), ...] over a box: one LP for each pattern of signs of its hidden neurons."""
    widths = [len(b) for _, b in layers[:-1]]
    best = np.inf
    for pattern in itertools.product((0, 1), repeat=sum(widths)):
        matrix, shift = np.eye(len(lower)), np.zeros(len(lower))
        rows, limits, signs = [], [], list(pattern)
        for weight, bias in layers[:-1]:
            matrix, shift = weight @ matrix, weight @ shift + bias
            on = np.array([signs.pop(0) for _ in bias])
            rows.append(np.where(on, -1, 1)[:, None] * matrix)
            limits.append(np.where(on, 1, -1) * shift)
            factor = np.where(on, 1.0, slope)
            matrix, shift = factor[:, None] * matrix, factor * shift
        weight, bias = layers[-1]
        matrix, shift = weight @ matrix, weight @ shift + bias
        for j in set(range(len(bias))) - {y}:
            found = linprog(
                matrix[y] - matrix[j], np.concatenate(rows), np.concatenate(limits), bounds=np.stack([lower, upper], 1)
            )
            if found.status == 0:
                best = min(best, found.fun + shift[y] - shift[j])
    return best

"""The curves of a run: the right values at the right places, gaps where a value is missing."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from holdfast.errors import InputError
from holdfast.utils.curves import curves
from holdfast.utils.panels import BOTTOM, HEAD, HEIGHT, LEFT, RIGHT, TOP, WIDTH

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    {"epoch": 1, "train_loss": 2.0, "validation_clean": 0.5, "seconds": 3.0},
    {"epoch": 2, "train_loss": math.nan, "validation_clean": 0.75, "validation_robust": 0.25},
    {"epoch": 3, "train_loss": 0.5, "validation_clean": 0.75, "validation_robust": 0.5},
]


def drawn(rows):
    """Points of each line by its name."""
    root = ElementTree.fromstring(curves(rows, "A & B"))
    found = {}
    for line in root.iter(f"{SVG}polyline"):
        found[line.find(f"{SVG}title").text] = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    return root, found


def test_losses_and_accuracies_have_a_panel_each():
    root, found = drawn(ROWS)
    assert list(found) == ["train_loss", "clean", "robust"]
    assert float(root.get("viewBox").split()[2]) == 2 * WIDTH
    left, right = WIDTH + LEFT, 2 * WIDTH - RIGHT
    assert [x for x, _ in found["clean"]] == [left, (left + right) / 2, right]
    top, bottom = HEAD + TOP, HEAD + HEIGHT - BOTTOM  # where the accuracies 1 and 0 are, whatever the run reached
    assert [y for _, y in found["clean"]] == [(top + bottom) / 2, *[(3 * top + bottom) / 4] * 2]
    assert len(found["train_loss"]) == len(found["robust"]) == 2
    assert root.get("aria-label") == "A & B"
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"1", "2", "3", "epoch", "clean", "robust"} <= set(texts)
    assert "1.5" not in texts[texts.index("accuracy on held-out inputs") :]  # epochs are whole numbers


def test_one_epoch_is_a_dot_and_many_have_none():
    root, _ = drawn(ROWS[:1])
    assert len(list(root.iter(f"{SVG}circle"))) == 2
    root, _ = drawn([{"epoch": i, "train_loss": 1.0 / i} for i in range(1, 60)])
    assert list(root.iter(f"{SVG}circle")) == []
    assert float(root.get("viewBox").split()[3]) == HEAD + HEIGHT


def test_nothing_finite_is_an_error():
    with pytest.raises(InputError, match="nothing to draw"):
        curves([{"epoch": 1, "train_loss": math.nan}], "t")

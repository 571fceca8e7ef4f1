"""Charts: well-formed SVG, everything inside the page, and marks where the numbers say."""

import math
import re
from xml.etree import ElementTree

import pytest
import torch
from nets import tiny_nets

import holdfast as hf
from holdfast.analyze.plots.charts import (
    STATES,
    lines_svg,
    path_svg,
    relu_svg,
    smoothness_svg,
    tightness_svg,
)
from holdfast.analyze.relu_state import relu_state
from holdfast.analyze.tightness import Tightness, tightness
from holdfast.errors import InputError
from holdfast.utils.panels import HEAD, HEIGHT, WIDTH
from holdfast.utils.svg import STYLES

SVG = "{http://www.w3.org/2000/svg}"
BASE = ("loss", "gradient_difference", "cosine_distance")
TARGET = ("target_cosine", "target_difference")


def rows(count, *, factor=1.0, keys=(*BASE, *TARGET), **changed):
    found = []
    for i in range(count):
        row = {"step": 10 * i, **dict.fromkeys(keys, factor * (i + 1) / 10)}
        found.append(row | {"loss_low": factor * (i + 0.5) / 10, "loss_high": factor * (i + 2) / 10} | changed)
    return found


def parsed(text):
    root = ElementTree.fromstring(text)
    width, height = map(float, root.get("viewBox").split()[2:])
    for shape in root.iter():
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", shape.get("points") or ""):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
    return root


def points(shape):
    return [tuple(map(float, point.split(","))) for point in shape.get("points").split()]


def test_smoothness_has_a_panel_for_each_measure_and_a_band():
    text = smoothness_svg({"a < b": rows(4), "c": rows(3, factor=20.0)}, title="T & t")
    root = parsed(text)
    assert root.get("viewBox") == f"0 0 {3 * WIDTH} {HEAD + 2 * HEIGHT}"
    assert "a &lt; b" in text
    assert "T &amp; t" in text
    lines, bands = list(root.iter(SVG + "polyline")), list(root.iter(SVG + "polygon"))
    assert [len(points(line)) for line in lines] == [4, 3] * 5
    assert [len(points(band)) for band in bands] == [8, 6]
    assert {line.get("stroke") for line in lines} == {colour for colour, _ in STYLES[:2]}
    upper, lower = points(bands[0])[:4], points(bands[0])[4:][::-1]
    for (x, top), (_, middle), (x_low, bottom) in zip(upper, points(lines[0]), lower, strict=True):
        assert x == x_low
        assert top < middle < bottom  # y grows downwards


def test_smoothness_without_a_target_is_one_row():
    root = parsed(smoothness_svg({"a": rows(3, keys=BASE), "b": rows(3)}))
    assert root.get("viewBox") == f"0 0 {3 * WIDTH} {HEAD + HEIGHT}"
    assert len(list(root.iter(SVG + "polyline"))) == 6


def test_values_that_are_not_finite_are_left_out():
    broken = rows(4)
    broken[1]["cosine_distance"] = math.nan
    broken[2]["loss_high"] = math.inf
    counts = [len(points(line)) for line in parsed(smoothness_svg({"a": broken})).iter(SVG + "polyline")]
    assert counts == [3, 4, 3, 4, 4]
    with pytest.raises(InputError, match="no value is finite"):
        smoothness_svg({"a": rows(3, cosine_distance=math.nan)})


@pytest.mark.parametrize("changed", [{"gradient_difference": 0.0}, {"target_cosine": -1.0}, {}])
def test_zeros_negative_values_and_single_rows_can_be_drawn(changed):
    parsed(smoothness_svg({"a": rows(1, **changed)}))


def test_paths():
    ts = (0.0, 0.5, 1.0)
    root = parsed(path_svg({"IBP": torch.tensor([1.0, 3.0, 2.0]), "CROWN-IBP": [0.5, 0.5, 0.5]}, ts))
    first, second = (points(line) for line in root.iter(SVG + "polyline"))
    assert first[1][1] < first[2][1] < first[0][1] < second[0][1]
    assert first[1][0] == pytest.approx((first[0][0] + first[2][0]) / 2, abs=0.1)
    for paths in ({"a": [1.0]}, {"a": [1.0, 2.0, math.nan]}):
        with pytest.raises(InputError, match="3 finite values"):
            path_svg(paths, ts)
    long = parsed(path_svg({f"a name of some length {i}": [1.0, 2.0, 3.0] for i in range(3)}, ts))
    assert long.get("viewBox") == f"0 0 {WIDTH} {HEAD + HEIGHT + 36}"  # a line of the legend for each
    with pytest.raises(InputError, match="1 to 5 lines"):
        path_svg({str(i): [1.0] for i in range(6)}, (0.0,))


@pytest.mark.parametrize("count", [1, 3, 30])
def test_relu_states_fill_the_bars_and_follow_the_budget(count):
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(5, *shape)
    states = {0.01 * i: relu_state(model, x, hf.Linf(0.01 * i)) for i in range(count)}
    root = parsed(relu_svg(states))
    bars = [r for r in root.iter(SVG + "rect") if r.find(SVG + "title") is not None]
    assert len(bars) == 3 * count
    heights = torch.tensor([float(bar.get("height")) for bar in bars]).view(count, 3)
    total = heights.sum(1)
    assert torch.allclose(total, total[:1], atol=0.2)
    for state, found in zip(states.values(), heights / total[:, None], strict=True):
        exact = torch.stack([getattr(state, name).sum() for name in STATES]).double()
        assert torch.allclose(found.double(), exact / exact.sum(), atol=2e-3)
    # Without a budget nothing is unstable, and there is no histogram.
    assert len(list(root.iter(SVG + "polyline"))) == min(count - 1, 5)


def test_boxes_stand_at_the_quartiles():
    values = torch.arange(5.0)
    root = parsed(
        tightness_svg({"ibp": Tightness(values * 10, values), "other": Tightness(values - 3, values * 0 + 2)})
    )
    groups = [g for g in root.iter(SVG + "g") if g.find(SVG + "rect") is not None]  # boxes
    assert len(groups) == 4
    low, high = (float(groups[2].find(SVG + "line").get(key)) for key in ("y1", "y2"))  # the losses 0 ... 4
    box = groups[2].find(SVG + "rect")
    assert float(box.get("height")) == pytest.approx((low - high) / 2, abs=0.2)
    assert float(box.get("y")) == pytest.approx(high + (low - high) / 4, abs=0.2)
    assert float(groups[3].find(SVG + "rect").get("height")) == 0


def test_real_tightness_and_what_cannot_be_drawn(tmp_path):
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(6, *shape)
    found = tightness(model, x, torch.arange(6) % 3, hf.Linf(0.05))
    path = tmp_path / "tightness.svg"
    path.write_text(tightness_svg(found))
    parsed(path.read_text())
    assert all(f">{name}<" in path.read_text() for name in found)
    empty = Tightness(torch.zeros(0), torch.zeros(0))
    with pytest.raises(InputError, match="'none' must be finite and of at least one input"):
        tightness_svg({"none": empty})
    for call in (tightness_svg, relu_svg, smoothness_svg):
        with pytest.raises(InputError, match="expected"):
            call({})
    with pytest.raises(InputError, match="at least one row"):
        smoothness_svg({"a": []})


@pytest.mark.parametrize("log", [False, True])
def test_a_line_chart(log):
    lines = {"a < b": [1.0, 0.03, 0.2], "c": [0.5, 2.0], "one": [0.1]}
    text = lines_svg(lines, title="T & t", x_label="epoch", y_label="trace", log=log)
    assert text.startswith("<svg ")
    assert "a &lt; b" in text
    assert "T &amp; t" in text
    lines_drawn = re.findall(r'<polyline points="([^"]*)"[^>]*stroke="(#\w+)"', text)
    points = [[tuple(map(float, p.split(","))) for p in drawn.split()] for drawn, _ in lines_drawn]
    assert [len(p) for p in points] == [3, 2, 1]
    assert len({colour for _, colour in lines_drawn}) == 3
    (top, low, middle), (_, highest), _ = ([y for _, y in p] for p in points)
    assert low > middle > top > highest  # y grows downwards
    assert all(0 <= v <= WIDTH for p in points for v, _ in p)
    assert all(0 <= v <= HEAD + HEIGHT for p in points for _, v in p)


@pytest.mark.parametrize("values", [[1.0], [3.0, 3.0], [1e-9, 1e9], [0.001, 0.999], [10.0, 1000.0]])
@pytest.mark.parametrize("log", [False, True])
def test_a_line_chart_has_a_few_ticks_around_its_values(values, log):
    text = lines_svg({"a": values}, title="", x_label="", y_label="", log=log)
    ticks = [float(tick) for tick in re.findall(r'text-anchor="end">([^<]*)<', text)]
    assert 2 <= len(ticks) <= 22
    assert ticks[0] <= min(values)
    assert max(values) <= ticks[-1]


def test_lines_that_cannot_be_drawn():
    labels = {"title": "", "x_label": "", "y_label": ""}
    with pytest.raises(InputError, match="1 to 5 lines"):
        lines_svg({str(i): [1.0] for i in range(6)}, **labels)
    with pytest.raises(InputError, match="none is empty"):
        lines_svg({"a": []}, **labels)
    with pytest.raises(InputError, match="finite"):
        lines_svg({"a": [math.nan]}, **labels)
    with pytest.raises(InputError, match="> 0"):
        lines_svg({"a": [0.0]}, log=True, **labels)

import re

import numpy as np
import pytest

from holdfast.analyze.plots.theory_pictures import SHADES, sketch_svg, version_space_svg
from holdfast.errors import InputError


def test_the_sketch_has_a_line_for_each_budget():
    picture = sketch_svg()
    assert all(f"eps = {eps}" in picture for eps in ("0", "0.6", "1.2"))


def area(picture, shade):
    """Cells of that shade in the first panel."""
    found = re.findall(rf'x="([0-9.]+)" y="[0-9.]+" width="4" height="([0-9.]+)" fill="{shade}"', picture)
    return sum(float(height) / 4 for left, height in found if float(left) < 260)


def test_shades_count_the_budgets():
    """Without a budget a half-plane of weights classifies x; with more budgets fewer weights do."""
    x = np.array([1.0, 0.5])
    assert area(version_space_svg(x, (0.0,)), SHADES[1]) == 1800
    both = version_space_svg(x, (0.0, 0.4))
    assert 0 < area(both, SHADES[2]) < 1800 == area(both, SHADES[1]) + area(both, SHADES[2])


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="two values"):
        version_space_svg(np.ones(3))

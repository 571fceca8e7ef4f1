"""The documentation page tells the truth: its example runs and its table is the table."""

import re
from pathlib import Path

import pytest

from holdfast.models import list_models

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/models.md", "exec"), {})
    assert (tmp_path / "model.safetensors").is_file()


def test_the_table_lists_every_model_with_its_parameters() -> None:
    rows = dict(re.findall(r"^\| `([^`]+)` \|.*→ \d+ \| ([\d,]+) \|", PAGE, re.MULTILINE))
    assert rows == {row.name: f"{row.parameters:,}" for row in list_models()}

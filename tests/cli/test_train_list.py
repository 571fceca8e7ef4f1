"""`holdfast train --list`: what recipes there are, for which threat, and what each one needs."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.cli import train as command
from holdfast.training import list_recipes


@pytest.fixture
def listed(monkeypatch):
    """Runs the command on a screen of a given width; gives the lines that it shows."""

    def run(*args: str, width: int = 400) -> list[str]:
        screen = io.StringIO()
        monkeypatch.setattr(command, "console", Console(file=screen, width=width))
        result = CliRunner().invoke(app, ["train", *args])
        assert result.exit_code == 0, result.output
        return screen.getvalue().splitlines()

    return run


@pytest.mark.parametrize("args", [("--list",), (), ("mnist-mini-at", "--list")])
def test_every_recipe_has_a_line_with_threat_and_needs(listed, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heading, *lines = listed(*args)
    assert heading.split("  ")[0] == "name"
    assert all(word in heading for word in ("what it is", "threat", "what it needs"))
    recipes = list_recipes()
    assert len(lines) == len(recipes)
    for line, recipe in zip(lines, recipes, strict=True):
        assert line.split()[0] == recipe.name
        assert recipe.summary in line
        assert recipe.threat is None or recipe.threat in line.split()
        assert line.rstrip().endswith(recipe.needs)
    assert not any(tmp_path.iterdir())


def test_names_are_whole_on_a_narrow_screen(listed):
    shown = [line.split()[0] for line in listed("--list", width=80)[1:] if not line.startswith(" ")]
    assert shown == [recipe.name for recipe in list_recipes()]

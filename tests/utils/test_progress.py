"""Progress: bars on a terminal, lines in a pipe, silence when asked for."""

import io

import pytest
from rich.console import Console

from holdfast.utils import progress


@pytest.fixture
def shown(monkeypatch):
    """Runs three tasks of four steps, a second of the given length each; gives what was written."""

    def run(show=True, *, seconds=4.0, terminal=False):
        text, clock = io.StringIO(), iter([seconds * i for i in range(100)])
        monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=text, force_terminal=terminal, width=80))
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        with progress.progress_bars(show) as bars:
            task = bars.add_task("attack", total=8)
            for _ in range(8):
                bars.advance(task)
        return text.getvalue()

    return run


def test_a_pipe_gets_a_line_every_ten_seconds(shown):
    lines = shown().splitlines()
    assert lines == ["attack: 3 of 8 (38%), about 20 s left", "attack: 6 of 8 (75%), about 8 s left"]


def test_short_runs_and_quiet_ones_say_nothing(shown):
    assert shown(seconds=1.0) == ""
    assert shown(False) == ""
    assert shown(False, terminal=True) == ""


def test_a_terminal_gets_bars(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=text, force_terminal=True, width=80))
    with progress.progress_bars() as bars:
        bars.advance(bars.add_task("attack", total=1))
    assert "attack" in text.getvalue()
    assert "1/1" in text.getvalue()

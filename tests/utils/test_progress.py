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


def test_a_notebook_gets_bars_that_go_away(monkeypatch):
    pages = []

    class Handle:
        def update(self, page):
            pages.append(page.data)

    def display(page, display_id):
        pages.append(page.data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    clock = iter([0.15 * i for i in range(100)])
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(force_jupyter=True))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.progress_bars() as bars:
        attack, proof = bars.add_task("<attack>", total=4), bars.add_task("proof", total=2)
        for _ in range(4):
            bars.advance(attack)
        bars.update(proof, completed=1)
    first, *middle, last = pages
    assert first.startswith('<progress value="1" max="4"></progress> &lt;attack&gt;: 1 of 4 (25%)')
    assert "proof: 0 of 2" in first
    assert len(middle) == 2  # not more often than the eye can follow
    assert "proof: 1 of 2 (50%)" in middle[-1]
    assert last == ""


def test_a_quiet_notebook_shows_nothing(monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: pytest.fail("something was shown"))
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(force_jupyter=True))
    with progress.progress_bars(False) as bars:
        bars.advance(bars.add_task("attack", total=1))


def test_a_search_is_heard_inside_and_its_state_is_not_worked_out_for_nobody(monkeypatch):
    heard, state = [], progress.Searched(1200, -0.12345, 7)
    progress.tell(lambda: pytest.fail("nobody listens"))
    with progress.heard_by(heard.append):
        progress.tell(lambda: state)
    progress.tell(lambda: pytest.fail("nobody listens any more"))
    assert heard == [state]
    with progress.progress_bars(False) as bars:
        bar = bars.add_task("certify linf:0.1", total=8)
        progress.told(bars, bar, "certify linf:0.1")(state)
        assert bars.tasks[0].description == "certify linf:0.1, 1,200 splits, worst bound -0.123, 7 parts left"

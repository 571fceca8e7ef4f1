"""`holdfast claims` lists, shows and repeats claims of the literature."""

import pytest

ENTRY = """
[[claim]]
id = "up-is-up"
source = "Doe, A Thesis, 2020, Table 1"
statement = "Up is up."
setup = "a toy"
command = "python benchmarks/up.py"
result = "1 > 0"
verdict = "confirmed"
date = "2026-01-01"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "claims.toml").write_text(ENTRY)
    return tmp_path / "benchmarks"


def test_the_list_has_ids_and_verdicts(holdfast, folder):
    code, out, _ = holdfast("claims")
    assert code == 0
    assert "up-is-up" in out
    assert "confirmed" in out
    assert holdfast("claims", "--verdict", "refuted")[0] == 2


def test_show_has_the_result_and_the_command(holdfast, folder):
    out = holdfast("claims", "show", "up-is-up")[1]
    assert "1 > 0" in out
    assert "python benchmarks/up.py" in out


@pytest.mark.parametrize(("verdict", "expected"), [("confirmed", 0), ("refuted", 1)])
def test_run_compares_with_the_record(holdfast, folder, verdict, expected):
    (folder / "up.py").write_text(f"print('claim up-is-up: {verdict}')")
    code, out, _ = holdfast("claims", "run", "up-is-up")
    assert code == expected
    assert f"up-is-up: {verdict} now, confirmed as recorded" in out


@pytest.mark.parametrize(
    ("minutes", "said"), [("", "how long this takes was not recorded"), ("minutes = 2.5\n", "about 2.5 CPU minutes")]
)
def test_run_says_how_long_it_takes_and_that_it_goes_on(holdfast, folder, minutes, said):
    (folder / "up.py").write_text("print('claim up-is-up: confirmed')")
    (folder / "claims.toml").write_text(ENTRY + minutes)
    out = holdfast("claims", "run", "up-is-up")[1]
    assert said in out
    assert "goes on where it was" in out


def test_outside_of_a_repository_run_says_where_to_go(holdfast):
    code, _, err = holdfast("claims", "run", "two-moons-top-flattens")
    assert code == 2
    assert "copy of the repository" in err


def test_outside_of_a_repository_the_list_of_the_package_is_shown(holdfast):
    assert "two-moons-top-flattens" in holdfast("claims")[1]

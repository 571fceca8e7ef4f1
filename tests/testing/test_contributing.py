"""CONTRIBUTING is true: one file and one import line add a method, and nothing else has to be touched."""

import filecmp
from pathlib import Path

import pytest

from testing.packages import SOURCE, copied_source, run_holdfast, run_python
from testing.toys import ATTACK, CERTIFICATE, CONTRACTS, OBJECTIVE, USE

STEPS = {
    "attacks": (ATTACK, "from holdfast.attacks import toy as _toy\n"),
    "certificates": (CERTIFICATE, "from holdfast.certificates import toy as _toy\n"),
    "training/objectives": (OBJECTIVE, "from holdfast.training.objectives import toy as _toy\n"),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    source = copied_source(tmp_path_factory.mktemp("contributor"))
    for folder, (text, line) in STEPS.items():
        package = source / "holdfast" / folder
        (package / "toy.py").write_text(text)
        init = package / "__init__.py"
        init.write_text(init.read_text() + line)
    return source


def changed(ours: Path, theirs: Path) -> set[str]:
    """Files that differ between two trees."""
    names = {
        str(path.relative_to(root))
        for root in (ours, theirs)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    same = filecmp.cmpfiles(ours, theirs, names, shallow=False)[0]
    return names - set(same)


def test_three_methods_take_three_files_and_three_lines(tree):
    wanted = {f"holdfast/{folder}/{name}" for folder in STEPS for name in ("__init__.py", "toy.py")}
    assert changed(SOURCE, tree) == wanted


def test_they_are_used_by_name_and_keep_their_contracts(tree):
    said = run_python(USE + CONTRACTS, path=[tree])
    assert "all toys work" in said
    assert "all toys keep their contracts" in said


def test_the_command_line_lists_them(tree):
    listed = run_holdfast("methods", path=[tree])
    assert all(f"a toy {kind}" in listed for kind in ("attack", "certificate", "objective"))


def test_the_page_says_these_steps():
    page = (SOURCE.parent / "CONTRIBUTING.md").read_text()
    for folder in STEPS:
        assert f"`src/holdfast/{folder}/NAME.py`" in page
    for words in ("holdfast.testing", "holdfast.methods", "make quick", "make test", "make lint", "make docs"):
        assert words in page

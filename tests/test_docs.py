"""The documentation tells the truth: its code runs, its tables follow from the registry, its links lead somewhere."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.audits import load_audit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAMILIES = [
    *("attacks", "minimum-norm", "trust", "threats", "bounds", "linear-bounds", "certify", "radii", "milp"),
    *("lipschitz", "gloro", "centroid", "smoothing", "smoothing-variants", "detection", "watermark", "explain"),
    *("training", "certified-training", "generalisation", "difficulty"),
]
SKELETON = ["Idea", "Maths", "When to use", "Limits", "Departures from the source", "Example"]
PAGES = [
    "centroid",
    "gloro",
    "linear-bounds",
    "lipschitz",
    "milp",
    "radii",
    "threats",
    "attacks",
    "minimum-norm",
    "trust",
    "bounds",
    "certify",
    "generalisation",
    "certified-training",
    "data",
    "detection",
    "explain",
    "smoothing",
    "scaling",
    "serve",
    "smoothing-variants",
    "watermark",
    "architecture",
]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path):
    """The documentation alone, to damage it."""
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*"))):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, tmp_path / name)
    for name in ("CHANGELOG.md", "LICENSE", "examples", "benchmarks"):  # what links lead to, as it is
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def code(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "demo" / "mnist-mini-at" / "model.safetensors"
    path.parent.mkdir(parents=True)
    hf.save_model(hf.make_model("linear", seed=0), path)
    blocks = code(README, "python")
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    assert re.fullmatch(r"(Between|Exactly) .* of 500 inputs hold at linf:0.1\.\n", capsys.readouterr().out)
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


def test_the_readme_names_commands_that_exist():
    from typer.testing import CliRunner

    from holdfast.cli import COMMANDS, app

    commands = re.findall(r"^holdfast (\w+) .*$", README, re.MULTILINE)
    (listed,) = re.findall(r"lists the other commands: (.*?)\.", README)
    commands += re.findall(r"`(\w+)`", listed)
    assert sorted(commands) == sorted(COMMANDS)
    for command in commands:
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = [b for b in code((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), "python") if "import" in b]
    assert blocks or page == "architecture"
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), {})


@pytest.mark.parametrize("page", FAMILIES)
def test_every_page_of_a_family_has_the_same_skeleton(page):
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SKELETON] == SKELETON
    own = [i for i, heading in enumerate(headings) if heading not in SKELETON]
    assert all(headings.index("When to use") < i < headings.index("Limits") for i in own)


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_text_is_at_most_120_columns_wide(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "    "))] == []


def test_the_tables_hold_every_method_with_its_options(build):
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for method in hf.methods():
        row = next(
            line for line in page.splitlines() if line.startswith(f"| `{method.name}` |") and method.summary in line
        )
        assert method.reference in row
        assert all(f"`{option}`" in row for option in method.options)
        assert f"| {method.kind} | `{method.name}` | {method.summary} | {method.guarantee} |" in README
    assert build.check(ROOT) == []


def test_an_option_called_noise_is_shown_where_it_is_one():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").splitlines()
    for name in ("n-fgsm", "smoothing-l1"):
        assert "`noise`" in next(line for line in page if line.startswith(f"| `{name}` |"))
    assert "`noise`" not in next(line for line in page if line.startswith("| `pgd` |"))


def test_an_outdated_table_is_noticed(build, copy):
    assert build.check(copy) == []
    page = copy / "docs" / "methods.md"
    page.write_text(page.read_text().replace("`fgsm`", "`fgms`"))
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("`pgd`", "`pdg`"))
    problems = build.check(copy)
    assert len(problems) == 2
    assert "docs/methods.md is out of date" in problems[0]
    assert "README.md is out of date" in problems[1]
    readme.write_text(build.readme(readme.read_text()))
    page.unlink()
    missing, *links = build.check(copy)
    assert "docs/methods.md is out of date" in missing
    assert "README.md: the link to docs/methods.md points nowhere" in links


def test_a_dead_link_is_noticed(build, copy):
    page = copy / "docs" / "attacks.md"
    good = "[web](https://example.org) [part](#idea) [page](bounds.md#idea) `[code](nowhere.md)`\n"
    page.write_text(good + "```\n[block](nowhere.md)\n```\n")
    assert build.dead_links(copy) == []
    page.write_text(good + "[gone](gone.md#part)")
    assert build.dead_links(copy) == ["docs/attacks.md: the link to gone.md#part points nowhere"]


def test_a_readme_without_markers_is_refused(build):
    with pytest.raises(SystemExit, match="<!-- methods -->"):
        build.readme("# Holdfast\n")


def test_check_and_build_as_commands(build, copy, monkeypatch):
    monkeypatch.setattr(build, "ROOT", copy)
    monkeypatch.setattr("sys.argv", ["build.py", "--check"])
    with pytest.raises(SystemExit) as stop:
        build.main()
    assert stop.value.code == 0
    (copy / "docs" / "methods.md").write_text("old")
    with pytest.raises(SystemExit, match=r"methods\.md is out of date"):
        build.main()
    monkeypatch.setattr("sys.argv", ["build.py"])
    build.main()
    assert build.check(copy) == []


def test_picture_and_output_come_from_a_run(build, copy, monkeypatch, tmp_path):
    model, data = hf.make_model("linear", seed=0).eval(), hf.load_data("mnist-mini")
    run = tmp_path / "run"
    hf.audit(model, data, hf.Linf(0.1), n=10, budgets=2, out=run)
    monkeypatch.setattr(build, "ROOT", copy)
    monkeypatch.setattr("sys.argv", ["build.py", "--run", str(run)])
    build.main()
    readme, picture = (copy / "README.md").read_text(), (copy / "docs" / "bracket.svg").read_text()
    assert load_audit(run).headline in readme
    assert f"report: {run}/report.html" in readme
    assert picture.startswith("<svg ")
    assert 'xmlns="http://www.w3.org/2000/svg"' in picture
    assert load_audit(run).headline in picture


def test_the_picture_and_the_output_of_the_readme_are_of_one_run():
    (headline,) = re.findall(r"^ *((?:Between|Exactly) .*? hold at .*?\.)$", README, re.MULTILINE)
    assert headline in (ROOT / "docs" / "bracket.svg").read_text(encoding="utf-8")

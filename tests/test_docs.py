"""The documentation tells the truth: its code runs, its tables follow from the registry, its links lead somewhere."""

import importlib.util
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import yaml

import holdfast as hf
from holdfast.audits import load_audit

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAMILIES = [
    *("attacks", "minimum-norm", "trust", "threats", "bounds", "linear-bounds", "certify", "radii", "milp", "verify"),
    *("lipschitz", "gloro", "centroid", "smoothing", "smoothing-variants", "detection", "watermark", "auctions"),
    "explain",
    *("training", "certified-training", "generalisation", "difficulty", "theory", "landscape"),
]
SKELETON = ["Idea", "Maths", "When to use", "Limits", "Departures from the source", "Example"]
PAGES = [
    "landscape",
    "theory",
    "centroid",
    "gloro",
    "linear-bounds",
    "lipschitz",
    "milp",
    "verify",
    "radii",
    "threats",
    "attacks",
    "auctions",
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


def load(name):
    """A script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build():
    return load("build")


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
    assert re.fullmatch(
        r"(Between|Exactly|At most) .* of the 500 test images keep their label when every pixel .* by up to 0.1.*\.\n",
        capsys.readouterr().out,
    )
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
    assert build.check(ROOT) == []


def test_the_readme_fits_on_a_screen_and_counts_every_family():
    assert len(README.encode()) <= 8192
    counted = {title: int(count) for count, title in re.findall(r"^\| \[(\d+) ([a-z ]+)\]\(docs/methods", README, re.M)}
    assert list(counted) == ["attacks", "bounds", "certificates", "explanations", "training objectives"]
    assert sum(counted.values()) == len(hf.methods())
    assert counted["attacks"] == len(hf.methods("attack"))


def test_the_comparisons_of_the_readme_are_in_the_results_that_they_name():
    rows = [line for line in README.splitlines() if line.startswith("|") and "benchmarks/results/" in line]
    assert len(rows) == 4
    for row in rows:
        question, ours, theirs, command = row.strip("| ").split(" | ")
        (link,) = re.findall(r"\]\((benchmarks/results/\w+\.md)\)", question)
        results = (ROOT / link).read_text(encoding="utf-8")
        for number in re.findall(r"\d+(?:\.\d+)+", ours + theirs):
            assert number in results, f"{number} is not in {link}"
        assert command.strip("`") in results
        assert (ROOT / command.strip("`").split()[1]).is_file()


def test_the_api_lists_every_public_name_with_its_place(build):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in hf.__all__:
        thing = getattr(hf, name)
        assert f"\n| `hf.{name}` | " in page
        assert f"\n::: {thing.__module__}.{thing.__qualname__}\n" in page
    assert page.index("## Values") < page.index("`hf.AttackResult`") < page.index("## Errors")
    assert page.index("## Errors") < page.index("`hf.InputError`")


def test_a_tutorial_is_its_notebook(build):
    cells = nbformat.read(ROOT / "examples" / "audit_own_model.ipynb", as_version=4).cells
    page = (ROOT / "docs" / "tutorial-audit.md").read_text(encoding="utf-8")
    assert code(page, "python") == [f"{cell.source}\n" for cell in cells if cell.cell_type == "code"]
    assert page.startswith("# Audit a model of your own\n\n*A notebook to run")


def nav_pages(nav):
    """The pages of a navigation, in order."""
    for entry in nav:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else nav_pages(target)


def test_the_site_lists_every_page_once_and_fetches_nothing():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(nav_pages(site["nav"])) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
    assert site["theme"]["font"] is False
    assert {"search", "offline"} <= {plugin for plugin in site["plugins"] if isinstance(plugin, str)}
    assert site["strict"] is True


def test_the_first_page_leads_to_every_other_one():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f"({path.name})" not in index]
    assert missing == ["index.md"]


@pytest.mark.parametrize(
    "word",
    ["threat", "linf", "l2", "patch", "attack", "certificate", "bracket", "robust radius", "undecided", "recipe"],
)
def test_the_glossary_explains_the_words_of_a_report(word):
    terms = re.findall(r"^\*\*(.*?)\.\*\* \S", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)
    assert word in map(str.lower, terms)
    assert len(terms) == len(set(terms))


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("griffe")
    return load("hooks")


def test_links_out_of_the_documentation_lead_to_copies_in_the_site(hooks):
    text = "[a](audit.md#idea) [b](../benchmarks/README.md) [c](https://x.org/y) [d](#idea) [e](gone.md)"
    moved = "[a](audit.md#idea) [b](project/benchmarks/README.md) [c](https://x.org/y) [d](#idea) [e](gone.md)"
    assert hooks.relinked(text, "serve.md") == moved
    back = hooks.relinked("[a](docs/architecture.md) [b](CHANGELOG.md)", "project/CONTRIBUTING.md")
    assert back == "[a](../architecture.md) [b](CHANGELOG.md)"
    assert hooks.relinked("[a](../docs/audit.md)", "project/benchmarks/README.md") == "[a](../../audit.md)"
    assert ROOT / "CONTRIBUTING.md" in list(hooks.outside(ROOT / "docs" / "index.md"))


def test_the_site_gets_the_empty_lines_that_its_markdown_needs(hooks):
    assert hooks.spaced("Text\n| a |\n|---|\n| b |") == "Text\n\n| a |\n|---|\n| b |"
    assert hooks.spaced("Text\n1. a\n   more\n2. b") == "Text\n\n1. a\n   more\n2. b"
    for same in ("```\nText\n- a\n```", "- a\n- b", "- a\n  more\n- b", "Text\n\n- a", "a - b\n-c"):
        assert hooks.spaced(same) == same


def test_examples_of_docstrings_become_code(hooks):
    text = "Text.\n\nExample:\n    >>> f(1)\n    [2]\n\nMore."
    assert hooks.fenced_examples(text) == "Text.\n\nExample:\n    ```pycon\n    >>> f(1)\n    [2]\n    ```\n\nMore."
    assert hooks.fenced_examples("No example.") == "No example."


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
    readme.write_text(readme.read_text().replace(" attacks](docs/methods", "1 attacks](docs/methods"))
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
    assert load_audit(run).headline in " ".join(readme.split())
    assert f"report: {run}/report.html" in readme
    assert picture.startswith("<svg ")
    assert 'xmlns="http://www.w3.org/2000/svg"' in picture
    assert load_audit(run).brackets[0].headline in picture


def test_the_picture_and_the_output_of_the_readme_are_of_one_run():
    (headline,) = re.findall(r"((?:Between|Exactly) \S+ % .*? may change by up to \S+)\.", " ".join(README.split()))
    assert headline.replace("test images", "images") in (ROOT / "docs" / "bracket.svg").read_text(encoding="utf-8")

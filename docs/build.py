"""Write the parts of the documentation that follow from the code or from a run, and check that they are current.

python docs/build.py                  methods.md, api.md, claims.md, the tutorials, the table of methods in the README
python docs/build.py --run FOLDER     also docs/bracket.svg and the output in the README, from that audit
python docs/build.py --check          changes nothing; exit code 1 if one of the tables is out of date or a relative
                                      link points nowhere
"""

import argparse
import inspect
import io
import json
import pydoc
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import holdfast as hf
from holdfast.audits import Audit, load_audit
from holdfast.cli.methods import default_text
from holdfast.registry import KINDS, Kind, Method
from holdfast.runs.claims import FILE, Claim, Erratum, Gap, read_claims, read_entries

ROOT = Path(__file__).resolve().parents[1]
TITLES: dict[Kind, str] = {
    "attack": "Attacks",
    "bounds": "Bounds",
    "certify": "Certificates",
    "explain": "Explanations",
    "train": "Training objectives",
}
BESIDE = (
    *("holdfast.runs.compare.compare", "holdfast.runs.compare_plot.Comparison", "holdfast.results.History"),
    "holdfast.utils.show.Svg",
)
"""What the API lists beside the names of `hf`."""
TUTORIALS = {"tutorial-audit.md": "audit_own_model", "tutorial-training.md": "train_attack_certify"}
"""Pages that are made of a notebook in examples/."""
FAMILIES: dict[Kind, tuple[dict[str, str], str]] = {
    "attack": (
        {"attacks": "attacks", "nearest examples": "minimum-norm", "trust": "trust"},
        "which inputs break: an upper bound of the robust accuracy",
    ),
    "bounds": ({"bounds": "bounds", "linear bounds": "linear-bounds"}, "what the network can output: a proof"),
    "certify": (
        {
            "certificates": "certify",
            "radii": "radii",
            "exact": "milp",
            "Lipschitz": "lipschitz",
            "smoothing": "smoothing",
        },
        "which inputs hold: a proof, or one with a stated probability",
    ),
    "explain": ({"explanations": "explain"}, "which pixels the answer depends on"),
    "train": (
        {"training": "training", "certified training": "certified-training"},
        "what makes a model hold; a recipe combines them",
    ),
}
"""Pages and answer of each kind of method, for the README."""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def options(method: Method) -> str:
    """List name, default, type and range of each option, one per line of the cell."""
    lines = [f"`{o.name}` = {default_text(o)} ({o.text})" for o in method.typed_options.values()]
    return "<br>".join(lines) or "-"


def methods_page() -> str:
    """Return the text of docs/methods.md."""
    intro = (
        "`docs/build.py` makes this page from the registry. `holdfast methods KIND` prints the same table, and "
        "`holdfast methods KIND NAME` prints one method with its options. An attack gives an *upper bound*: the truth "
        "is no higher. A *proof* holds for the network in real arithmetic and as it is computed in floating point. "
        "Options are written `name` = default (type and range)."
    )
    parts = ["# Methods", textwrap.fill(intro, 120)]
    columns = ("name", "what it does", "guarantee", "threats", "options", "reference")
    for kind in KINDS:
        rows = [
            (f"`{m.name}`", m.summary, m.guarantee, " ".join(m.threats) or "-", options(m), m.reference)
            for m in hf.methods(kind)
        ]
        parts += [f"## {TITLES[kind]}", table(columns, rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def api_page() -> str:
    """Return the text of docs/api.md: every public name with its first sentence, and where the site puts the rest."""
    intro = (
        "Everything that `import holdfast as hf` offers, and a few names beside it. `docs/build.py` makes this page; "
        "the site (`make docs`) fills in signatures, arguments and attributes from the docstrings. `help(hf.audit)` "
        "prints the same."
    )
    objects = {f"hf.{name}": getattr(hf, name) for name in hf.__all__}
    objects |= {path: pydoc.locate(path) for path in BESIDE}
    groups = {
        "Functions": [name for name, thing in objects.items() if not isinstance(thing, type)],
        "Values": [name for name, thing in objects.items() if isinstance(thing, type) and not is_error(thing)],
        "Errors": [name for name, thing in objects.items() if is_error(thing)],
    }
    parts = ["# API", textwrap.fill(intro, 120)]
    for title, names in groups.items():
        rows = [(f"`{name}`", (inspect.getdoc(objects[name]) or "").partition("\n")[0]) for name in names]
        places = [f"::: {objects[name].__module__}.{objects[name].__qualname__}" for name in names]
        parts += [f"## {title}", table(("name", "what it is"), rows), *places]
    return "\n\n".join(parts) + "\n"


def is_error(thing: object) -> bool:
    """Whether it can be raised."""
    return isinstance(thing, type) and issubclass(thing, Exception)


def claims_page() -> str:
    """Return the text of docs/claims.md: every claim that was checked, by source, with its verdict."""
    claims = read_claims(ROOT / FILE)
    counts = Counter(claim.verdict for claim in claims)
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    intro = (
        "What the literature says, and what came out when it was tried here, at a size that two cores can run. "
        "`docs/build.py` makes this page from `benchmarks/claims.toml`; `holdfast claims run ID` repeats a claim. "
        f"{len(claims)} claims: {total}."
    )
    parts = ["# Claims", textwrap.fill(intro, 120)]
    for work in dict.fromkeys(work_of(claim) for claim in claims):
        rows = [
            (
                f"`{c.id}`",
                f"{c.statement} ({c.source.removeprefix(work).lstrip(', ')})",
                f"**{c.verdict}**" + (f" ({c.seeds} seeds)" if c.seeds else ""),
                c.result or c.reason,
                f"{c.setup}; `{c.command}`" + (f", {c.minutes:g} CPU min" if c.minutes else ""),
            )
            for c in claims
            if work_of(c) == work
        ]
        parts += [f"## {work}", table(("id", "claim", "verdict", "what came out", "set-up and command"), rows)]
    errata = [(e.source, e.printed, e.instead, f"`{e.test}`") for e in read_entries(ROOT / FILE, "erratum", Erratum)]
    gaps = [(gap.source, gap.what, gap.why) for gap in read_entries(ROOT / FILE, "gap", Gap)]
    parts += [
        "## Where the sources are wrong",
        "The code follows the corrected form, and the test named holds it.",
    ]
    parts += [table(("where", "printed", "right", "test"), errata)]
    parts += ["## What is not here", "Methods and figures of the works that are missing or incomplete."]
    parts += [table(("where", "what", "why"), gaps)]
    return "\n\n".join(parts) + "\n"


def work_of(claim: Claim) -> str:
    """The work that a claim is from: its source up to the year."""
    found = re.match(r".*?\b(19|20)\d\d\b", claim.source)
    return found[0] if found else claim.source


def tutorial(notebook: Path) -> str:
    """Return the cells of a notebook as a page."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    title, *rest = [text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in texts]
    note = f"*A notebook to run and change: [{notebook.name}](../examples/{notebook.name}).*"
    heading, _, opening = title.partition("\n\n")
    return "\n\n".join([heading, note, opening, *rest]) + "\n"


def pages() -> dict[str, str]:
    """Return the text of every page that is made here, by its name in docs/."""
    tutorials = {page: tutorial(ROOT / "examples" / f"{name}.ipynb") for page, name in TUTORIALS.items()}
    return {"methods.md": methods_page(), "api.md": api_page(), "claims.md": claims_page(), **tutorials}


def readme_table() -> str:
    """Put every family of methods into one row: how many there are, what they answer, where to read on."""
    rows = []
    for kind, (pages, answer) in FAMILIES.items():
        count, link = len(hf.methods(kind)), f"docs/methods.md#{TITLES[kind].lower().replace(' ', '-')}"
        links = ", ".join(f"[{name}](docs/{page}.md)" for name, page in pages.items())
        rows.append((f"[{count} {TITLES[kind].lower()}]({link})", answer, links))
    return table(("methods", "what they answer", "read"), rows)


def between(text: str, marker: str, content: str) -> str:
    """Replace the text between <!-- marker --> and <!-- /marker -->."""
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise SystemExit(f"README.md must hold <!-- {marker} --> and <!-- /{marker} --> once")
    return pattern.sub(lambda match: f"{match[1]}{content}\n{match[2]}", text)


def readme(text: str, run: Path | None = None) -> str:
    """Renew the generated parts of the README; the output only if there is a run to take it from."""
    text = between(text, "methods", readme_table())
    if run is None:
        return text
    return between(text, "output", f"```text\n{printed(load_audit(run))}\nreport: {run / 'report.html'}\n```")


def printed(audit: Audit) -> str:
    """Return the table as `holdfast audit` prints it into a file or pipe."""
    screen = io.StringIO()
    Console(file=screen, width=80).print(audit.table())
    return "\n".join(line.rstrip() for line in screen.getvalue().splitlines())


def dead_links(root: Path) -> list[str]:
    """List relative links and pictures of README.md, CONTRIBUTING.md and docs/*.md that point to no file."""
    dead = []
    for page in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.partition("#")[0]
            if path and "://" not in path and not path.startswith("mailto:") and not (page.parent / path).exists():
                dead.append(f"{page.relative_to(root)}: the link to {target} points nowhere")
    return dead


def check(root: Path) -> list[str]:
    """List what is wrong with the documentation under `root`, one line each."""
    problems, text = [], (root / "README.md").read_text(encoding="utf-8")
    for name, content in pages().items():
        page = root / "docs" / name
        if not page.is_file() or page.read_text(encoding="utf-8") != content:
            problems.append(f"docs/{name} is out of date; run python docs/build.py")
    if text != readme(text):
        problems.append("the table of methods in README.md is out of date; run python docs/build.py")
    return problems + dead_links(root)


def main() -> None:
    """Read the options; write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if something is out of date")
    parser.add_argument("--run", type=Path, help="folder of a finished audit for the picture and the output")
    given = parser.parse_args()
    if given.check:
        problems = check(ROOT)
        sys.exit("\n".join(problems) if problems else 0)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (ROOT / "README.md").write_text(readme(text, given.run), encoding="utf-8")
    for name, content in pages().items():
        (ROOT / "docs" / name).write_text(content, encoding="utf-8")
    if given.run is not None:
        (ROOT / "docs" / "bracket.svg").write_text(str(load_audit(given.run).plot()), encoding="utf-8")


if __name__ == "__main__":
    main()

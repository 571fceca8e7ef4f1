"""Write the parts of the documentation that follow from the code or from a run, and check that they are current.

python docs/build.py                  docs/methods.md and the table of methods in the README
python docs/build.py --run FOLDER     also docs/bracket.svg and the output in the README, from that audit
python docs/build.py --check          changes nothing; exit code 1 if one of the tables is out of date or a relative
                                      link points nowhere
"""

import argparse
import io
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import holdfast as hf
from holdfast.audits import Audit, load_audit
from holdfast.audits.report.plot import bracket_plot
from holdfast.cli.methods import default_text
from holdfast.registry import KINDS, Kind, Method

ROOT = Path(__file__).resolve().parents[1]
TITLES: dict[Kind, str] = {
    "attack": "Attacks",
    "bounds": "Bounds",
    "certify": "Certificates",
    "explain": "Explanations",
    "train": "Training objectives",
}
# A picture outside a page needs its own colours; these are the colours of the report.
STYLE = """<style>
svg { --card: #ffffff; --ink: #1b2130; --soft: #5b6475; --line: #e2e5eb; --attacked: #c44f00; --certified: #0068a8;
  background: var(--card); font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --card: #1b202a; --ink: #e8ebf2; --soft: #9aa4b6; --line: #2e3542; --attacked: #f0a04b; --certified: #62b8f0; }
}
text { fill: var(--soft); font-size: 14px; } .axis { fill: var(--ink); } line.grid { stroke: var(--line); }
.band { fill: var(--certified); fill-opacity: .14; } .clean { stroke: var(--soft); stroke-width: 1.8;
  stroke-dasharray: 6 5; }
.line { fill: none; stroke-width: 2.5; stroke-linejoin: round; } .mark { stroke: var(--card); stroke-width: 1.5; }
.line.attacked { stroke: var(--attacked); } .mark.attacked { fill: var(--attacked); }
.line.certified { stroke: var(--certified); } .mark.certified { fill: var(--certified); }
</style>"""


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


def readme_table() -> str:
    """Put every method into one table, folded so that the README stays on one screen."""
    counts = [f"{len(hf.methods(kind))} {TITLES[kind].lower()}" for kind in KINDS if hf.methods(kind)]
    rows = [(m.kind, f"`{m.name}`", m.summary, m.guarantee, m.reference) for m in hf.methods()]
    columns = ("kind", "name", "what it does", "guarantee", "reference")
    return f"<details><summary>{', '.join(counts)}</summary>\n\n{table(columns, rows)}\n\n</details>"


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


def picture(audit: Audit) -> str:
    """Draw the bracket as a separate SVG file."""
    opening, rest = bracket_plot(audit.brackets[0]).split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg">\n{STYLE}{rest}\n'


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
    page, text = root / "docs" / "methods.md", (root / "README.md").read_text(encoding="utf-8")
    problems = []
    if not page.is_file() or page.read_text(encoding="utf-8") != methods_page():
        problems.append("docs/methods.md is out of date; run python docs/build.py")
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
    (ROOT / "docs" / "methods.md").write_text(methods_page(), encoding="utf-8")
    if given.run is not None:
        (ROOT / "docs" / "bracket.svg").write_text(picture(load_audit(given.run)), encoding="utf-8")


if __name__ == "__main__":
    main()

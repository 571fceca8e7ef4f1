"""Make the site out of pages that are written to be read as files too.

Links that leave docs/ (to benchmarks, examples, CONTRIBUTING.md) lead to copies under project/ in the site. Lists and
tables need no empty line before them on GitHub; the site's Markdown gets one. Examples in docstrings become code.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = "project"
SHIM = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")


def on_files(files: Files, *, config: Any) -> Files:
    """Add every file outside docs/ that a page links to, and what these link to in turn."""
    todo = [DOCS / page.src_uri for page in files.documentation_pages()]
    known = set(todo)
    while todo:
        page = todo.pop()
        for target in set(outside(page)) - known:
            known.add(target)
            files.append(File.generated(config, site_path(target), abs_src_path=str(target)))
            todo += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links into the site, and space the page out."""
    return spaced(relinked(markdown, page.file.src_uri))


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Take the one script that the theme would fetch from the network from the site itself."""
    return output.replace(SHIM, f"{'../' * page.file.dest_uri.count('/')}worker.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for pages that are not written in Markdown, such as 404.html."""
    return output_content.replace(SHIM, "worker.js")


def outside(page: Path) -> Iterator[Path]:
    """Files of the project, but not of docs/, that a page links to."""
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target = linked(page, link)
        if target is not None and not target.is_relative_to(DOCS):
            yield target


def linked(page: Path, link: str) -> Path | None:
    """Return the file that a relative link means, the README of a folder; None if it is not a file of the project."""
    target = (page.parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def site_path(path: Path) -> str:
    """Return where a file of the project is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"{ELSEWHERE}/{path.relative_to(ROOT).as_posix()}"


def relinked(markdown: str, src_uri: str) -> str:
    """Rewrite the links of a page for its place in the site."""
    inside = src_uri.startswith(f"{ELSEWHERE}/")
    page = ROOT / src_uri.removeprefix(f"{ELSEWHERE}/") if inside else DOCS / src_uri

    def moved(match: re.Match[str]) -> str:
        target = linked(page, match[1])
        return match[1] if target is None else posixpath.relpath(site_path(target), posixpath.dirname(src_uri) or ".")

    return LINK.sub(moved, markdown)


def spaced(markdown: str) -> str:
    r"""Put an empty line before every list and table that follows a line of text.

    >>> spaced("Text:\n- a\n- b")
    'Text:\n\n- a\n- b'
    """
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        starts_list = bool(re.match(r"([-*]|\d+\.) ", line)) and not re.match(r"([-*]|\d+\.) |\s", before)
        starts_table = line.startswith("|") and not before.startswith("|")
        if before.strip() and not fenced and (starts_list or starts_table):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


class Doctests(griffe.Extension):
    """Show the examples of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of one docstring."""
        if obj.docstring:
            obj.docstring.value = fenced_examples(obj.docstring.value)


def fenced_examples(text: str) -> str:
    r"""Put a fence around each paragraph that begins with a prompt.

    >>> fenced_examples(">>> 1 + 1\n2")
    '```pycon\n>>> 1 + 1\n2\n```'
    """

    def fence(match: re.Match[str]) -> str:
        return f"{match[1]}```pycon\n{match[0]}\n{match[1]}```"

    return re.sub(r"^( *)>>> .*(?:\n *\S.*)*", fence, text, flags=re.MULTILINE)

"""How values show themselves: a few lines of text, small tables in a notebook and in a paper, pandas, pictures."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.utils.files import write_text
from holdfast.utils.limits import shortened, shortened_text

_KINDS, _WIDTH = 5, 100  # names that are counted one by one; characters of such a list
_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


class Shown:
    """A dataclass that prints one line for each field in place of its tensors; a small table in a notebook.

    The dataclass needs `repr=False`, or it makes a `repr` of its own.
    """

    def __repr__(self) -> str:
        return lines(type(self).__name__, described(self))

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, ("", ""), list(described(self).items()))


@dataclass(frozen=True)
class Svg:
    """A picture: a notebook shows it, `str` gives its text, `save` writes it into a file.

    Attributes:
        text: the whole SVG file.
        alt: what the picture says, for those who do not see it.
    """

    text: str
    alt: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"picture: {self.alt} (shown in a notebook; .save('picture.svg') writes it)"

    def _repr_html_(self) -> str:
        # As an image the picture keeps its style sheet to itself and follows light and dark.
        data = base64.b64encode(self.text.encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(self.alt)}" style="max-width: 100%"/>'

    def save(self, path: str | Path) -> Path:
        """Write the picture into a file that ends in .svg; return its path."""
        path = Path(path)
        if path.suffix.lower() != ".svg":
            raise InputError(f"the picture is SVG; expected a name that ends in .svg, got '{path.name}'")
        write_text(path, self.text)
        return path


def lines(title: str, about: Mapping[str, str]) -> str:
    """Return the title, then one indented line for each name."""
    width = max(map(len, about), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in about.items())])


def described(value: object) -> dict[str, str]:
    """Describe every field of a dataclass that is not None, in a few words each."""
    pairs = ((field.name, getattr(value, field.name)) for field in fields(value) if field.repr)  # type: ignore[arg-type]
    return {name: words(content) for name, content in pairs if content is not None}


def words(value: object) -> str:
    """Describe a value in a few words: counts and ranges in place of tensors.

    >>> words(("pgd", "", "pgd"))
    'pgd 2, none 1'
    """
    if isinstance(value, Tensor):
        return _tensor_words(value.detach())
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}, {sum(p.numel() for p in value.parameters()):,} parameters"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple) and value and all(isinstance(item, str) for item in value):
        return _counted(value)
    if isinstance(value, Shown):
        return "; ".join(f"{name}: {text}" for name, text in described(value).items())
    return str(value) if isinstance(value, str | Path) else shortened(value).partition("\n")[0]


def percent(share: float) -> str:
    """Share as text.

    >>> percent(0.7125)
    '71.2 %'
    """
    return f"{100 * share:.1f} %"


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Make a table for a notebook; a head only if a column has a name."""
    head = f"<thead><tr>{_cells('th', columns)}</tr></thead>" if any(columns) else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    caption = f'<caption style="caption-side: top; text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def latex_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Make a table in the style of the LaTeX package booktabs: first column to the left, others to the right."""
    lined = [" & ".join(map(latex_text, map(str, row))) + r" \\" for row in (columns, *rows)]
    return "\n".join(
        [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{latex_text(title)}}}",
            f"\\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
            r"\toprule",
            lined[0],
            r"\midrule",
            *lined[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def latex_text(text: str) -> str:
    r"""Escape what LaTeX would read as commands.

    >>> print(latex_text("50 % of a_b"))
    50 \% of a\_b
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def data_frame(rows: Sequence[Mapping[str, object]]) -> Any:
    """Make a `pandas.DataFrame`, one row each; an error that says what to install where pandas is missing."""
    try:
        import pandas
    except ImportError as error:
        raise InputError("to_pandas needs pandas; pip install 'holdfast[pandas]' or pip install pandas") from error
    return pandas.DataFrame(list(rows))


def _tensor_words(value: Tensor) -> str:
    if value.dim() == 0:
        return f"{value.item():.4g}"
    if value.dim() == 1 and len(value) and value.dtype == torch.bool:
        return f"{int(value.sum())} of {len(value)} ({percent(float(value.double().mean()))})"
    finite = value[value.isfinite()]
    lost = f", {value.numel() - finite.numel():,} not finite" if finite.numel() < value.numel() else ""
    ends = f"{finite.min().item():.4g} to {finite.max().item():.4g}" if finite.numel() else "no value"
    if value.dim() == 1:
        return ends + (f", median {finite.double().median().item():.4g}" if finite.numel() else "") + lost
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}, {ends}{lost}"


def _counted(names: Sequence[str]) -> str:
    if 1 < len(names) == len(set(names)):
        return shortened_text(", ".join(names), _WIDTH)
    counts = Counter(name or "none" for name in names).most_common()
    rest = sum(count for _, count in counts[_KINDS:])
    shown = [f"{name} {count}" for name, count in counts[:_KINDS]] + ([f"others {rest}"] if rest else [])
    return shortened_text(", ".join(shown), _WIDTH)


def _cells(tag: str, row: Sequence[object]) -> str:
    first, *others = row
    left = f'<{tag} style="text-align: left">{escape(str(first))}</{tag}>'
    return left + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in others)

"""The hardest and the easiest training images of a run as one page."""

from collections.abc import Sequence
from html import escape

from torch import Tensor

from holdfast.utils.png import data_uri, is_picture

_STYLE = (
    "body{font:16px/1.4 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "figure{display:inline-block;margin:.3em;text-align:center;font-size:.8em}"
    "img{width:5.5em;image-rendering:pixelated;border:1px solid #888}svg{max-width:100%;height:auto}"
)


def difficulty_page(
    x: Tensor, y: Tensor, d: Tensor, classes: Sequence[str], *, title: str, count: int = 40, charts: Sequence[str] = ()
) -> str:
    """HTML with the `count` hardest and easiest inputs, each with its index, label and difficulty.

    Args:
        x: inputs, shape (N, ...), shown if they are images with one or three channels.  y: labels, shape (N,).
        d: difficulties, shape (N,); 0 is the hardest.
        classes: names of the classes.
        charts: SVG texts that the page begins with.
    """
    order = d.argsort(stable=True)
    parts = [f"<h1>{escape(title)}</h1>", "<p>Difficulty 0 is the hardest input, 1 the easiest.</p>", *charts]
    for name, chosen in (("Hardest", order[:count]), ("Easiest", order.flip(0)[:count])):
        shown = [_figure(x[i], i, classes[int(y[i])], float(d[i])) for i in chosen.tolist()]
        parts += [f"<section><h2>{name}</h2>", *shown, "</section>"]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _figure(x: Tensor, i: int, label: str, d: float) -> str:
    caption = f"{escape(label)}, {d:.4f}<br>input {i}"
    if not is_picture(tuple(x.shape)):
        return f"<figure><figcaption>{caption}</figcaption></figure>"
    image = data_uri(x.detach().cpu().numpy())
    alt = f"input {i}, label {escape(label)}"
    return f'<figure><img src="{image}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'

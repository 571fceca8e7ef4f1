"""One page about an auction: figures in words, pictures of what it does, both ends of the regret, classical rivals."""

import itertools
from html import escape

import torch
from torch import Tensor

from holdfast.apps.auctions.auction_net import AuctionNet
from holdfast.apps.auctions.classical import grand_bundle, manelli_vincent, myerson, vcg
from holdfast.apps.auctions.mechanism import Mechanism, with_bids
from holdfast.apps.auctions.regret import Regret
from holdfast.apps.auctions.statements import Statement
from holdfast.utils.png import data_uri
from holdfast.utils.svg import STYLES, Axes, figure, inner_rounds, rounds, stroke, text

CELLS, BINS = 60, 30
_CSS = """:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 60rem; }
figure { display: inline-block; margin: 0.5rem 1rem 0.5rem 0; } figcaption { font-size: 0.85rem; max-width: 180px; }
img { width: 180px; height: 180px; image-rendering: pixelated; border: 1px solid #888; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } svg { max-width: 100%; height: auto; }
td, th { padding: 0.2rem 0.8rem 0.2rem 0; text-align: right; } td:first-child, th:first-child { text-align: left; }
@page { margin: 2cm; }"""


def auction_page(
    mechanism: AuctionNet,
    values: Tensor,
    regret: Regret,
    statement: Statement,
    *,
    title: str = "Auction",
    fresh: bool = True,
) -> str:
    """The page as HTML, without any other file; `fresh` says that the training did not see the values."""
    s = statement
    head = (
        f"On {s.profiles:,} profiles of values, the auction earns {s.revenue:.4f} on average. By lying a bidder gains "
        f"at least {s.found:.4f} on average (the best lies that were found) and provably at most {s.proved:.4f}; "
        f"nobody gains more than {s.largest:.4f} in any of these profiles."
    )
    if s.empirical is not None and s.ratio is not None:
        head += f" Gradient ascent gains {s.empirical:.4f} on average, {s.ratio:.0%} of what is proved."
    spread = (
        f"For fresh values from the same distribution, the expected regret is at most {s.mean_above:.4f} (Hoeffding) "
        f"or {s.bernstein_above:.4f} (Bernstein), each with confidence {s.confidence:.0%}"
    )
    if s.quantile_above is not None:
        spread += (
            f"; in nine of ten profiles no bidder gains more than {s.quantile_above:.4f}, with the same confidence"
        )
    if not fresh:
        spread = "The auction was trained on these values, which therefore say nothing about others"
    if s.violations:
        pays = (
            f"{s.violations:.1%} of the bidders pay more than what they get is worth to them, at most "
            f"{s.violation_largest:.4f} too much. Without these payments the auction earns {s.revenue_kept:.4f}."
        )
    else:
        pays = "No bidder pays more than what it gets is worth to it."
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in (head, spread + ".", pays))]
    parts += ["<h2>What it does</h2>", *_pictures(mechanism, values)] if mechanism.items >= 2 else []
    parts += ["<h2>Regret of every bidder in every profile</h2>", regret_svg(regret)]
    parts += ["<h2>Beside classical mechanisms</h2>", '<div class="scroll">', _table(mechanism, values, s), "</div>"]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title><style>{_CSS}</style></head>\n'
        f"<body>{''.join(parts)}</body></html>\n"
    )


@torch.no_grad()
def _pictures(mechanism: AuctionNet, values: Tensor) -> list[str]:
    """Shares of the first two items and the payment of bidder 1 over its bids for them; all else as in profile 1."""
    low, high = mechanism.support.low, mechanism.support.high
    axis = low + (high - low) * (torch.arange(CELLS) + 0.5) / CELLS
    across, up = torch.meshgrid(axis, axis.flip(0), indexing="xy")
    first = values[:1].expand(CELLS * CELLS, -1, -1)
    bids = first[:, 0].clone()
    bids[:, 0], bids[:, 1] = across.flatten().to(bids), up.flatten().to(bids)
    outcome = mechanism(with_bids(first, torch.zeros(len(first), dtype=torch.long), bids))
    most = mechanism.items * high
    drawn = (
        ("share of item 1", outcome.allocation[:, 0, 0], 1.0),
        ("share of item 2", outcome.allocation[:, 0, 1], 1.0),
        (f"payment, white is {most:g}", outcome.payment[:, 0], most),
    )
    return [
        f'<figure><img alt="{name}" src="{data_uri(value.view(1, CELLS, CELLS).numpy(), high=top)}"><figcaption>'
        f"{name}; bid for item 1 to the right, for item 2 upwards, {low:g} to {high:g}</figcaption></figure>"
        for name, value, top in drawn
    ]


def regret_svg(regret: Regret) -> str:
    """Histogram of the regret over profiles and bidders: bars for what was found, a line for what is proved."""
    found, proved = regret.found.flatten(), regret.proved.flatten()
    edge = rounds(0, max(float(proved.max()), 1e-6))[-1]
    counts = [torch.histc(end, BINS, 0, edge).tolist() for end in (found, proved)]
    axes = Axes(60, 690, 20, 250, (0.0, edge), rounds(0, max(map(max, counts))))
    parts = axes.grid("gain by lying", inner_rounds(*axes.x))
    colour, line = STYLES[0][0], STYLES[1]
    for i, count in enumerate(counts[0]):
        left, right = axes.across(edge * i / BINS), axes.across(edge * (i + 1) / BINS)
        parts.append(
            f'<rect x="{left:.1f}" y="{axes.up(count):.1f}" width="{right - left - 1:.1f}" '
            f'height="{axes.bottom - axes.up(count):.1f}" fill="{colour}" fill-opacity="0.6"/>'
        )
    steps = [edge * i / BINS for i in range(BINS + 1)]
    xs = [x for pair in itertools.pairwise(steps) for x in pair]
    parts.append(axes.line(xs, [count for count in counts[1] for _ in range(2)], line, "proved"))
    parts += [
        f'<rect x="560" y="28" width="14" height="10" fill="{colour}" fill-opacity="0.6"/>',
        text(580, 37, "found"),
    ]
    parts += [f'<line x1="560" x2="574" y1="53" y2="53" {stroke(*line)}/>', text(580, 57, "proved")]
    return figure(parts, 720, 300, title="Histogram of the regret: what lies gain, and what is proved")


def _table(mechanism: AuctionNet, values: Tensor, s: Statement) -> str:
    rows = [("this auction", s.revenue, f"{s.found:.4f} to {s.proved:.4f}")]
    rows += [(name, float(m(values).payment.double().sum(1).mean()), "0") for name, m in classical_for(mechanism)]
    cells = "".join(f"<tr><td>{name}</td><td>{revenue:.4f}</td><td>{gain}</td></tr>" for name, revenue, gain in rows)
    return f"<table><tr><th>mechanism</th><th>revenue</th><th>mean regret</th></tr>{cells}</table>"


def classical_for(mechanism: Mechanism) -> list[tuple[str, Mechanism]]:
    """Classical mechanisms of the same size, by name."""
    n, k, support = mechanism.bidders, mechanism.items, mechanism.support
    found: list[tuple[str, Mechanism]] = [
        ("second price (VCG)", vcg(n, k, support=support)),
        ("Myerson, item by item", myerson(n, k, support=support)),
    ]
    if (n, k, support.low, support.high) == (1, 2, 0.0, 1.0):
        found += [("grand bundle", grand_bundle(2)), ("Manelli and Vincent (optimal)", manelli_vincent())]
    return found

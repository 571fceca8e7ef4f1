"""What the box adds to the ball: the tightness of BCP, and a picture of the logits that it cannot rule out.

Lee, Lee and Park, "Lipschitz-certifiable training with a tight outer bound", 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor, nn

from holdfast.attacks.pgd import pgd
from holdfast.bounding.ball_box.margin import Outer, outer_bound, proven_norm, translations
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.certificates.bcp import BALLS
from holdfast.certificates.core.proved_norms import cached_norm
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.threats import Threat
from holdfast.utils.svg import figure, inner_rounds, stroke, text

SIZE, LEFT, TOP, BOTTOM, LEGEND = 420, 62, 30, 48, 190  # of the panel, its margins, and of the legend beside it
POINTS = 180  # of the ellipse


@dataclass(frozen=True, eq=False)
class Tau:
    """Mean fall of z_j - z_i over all pairs of classes that cannot be ruled out, (B,): lower is tighter.

    Attributes:
        boxed: over the ball and the box.
        plain: over the ball only, which is what the plain Lipschitz bound gives; never below `boxed`.
    """

    boxed: Tensor
    plain: Tensor


@dataclass(frozen=True)
class Boundary:
    """One input in the plane of two logits: the logit of its label y, and the logit of the class that comes next.

    Attributes:
        classes: y and the runner-up.
        logits: (z_y, z_m) at x.
        boxed, plain: smallest z_y - z_m over the ball and the box, and over only the ball; verified if above zero.
        ellipse: outline of the image of the ball, points (z_y, z_m).
        attacked: (z_y, z_m) where attacks ended, by the name of their loss.
    """

    classes: tuple[int, int]
    logits: tuple[float, float]
    boxed: float
    plain: float
    ellipse: tuple[tuple[float, float], ...]
    attacked: dict[str, tuple[float, float]]


def _outer(model: nn.Module, x: Tensor, threat: Threat) -> Outer:
    return outer_bound(trace(model, x, threat), region(threat, x, sound=False), proven_norm(cached_norm), sound=False)


def _check(threat: Threat) -> None:
    if threat.name not in BALLS:
        raise UnsupportedError(f"BCP has no ball for the threat '{threat}'; use one of {', '.join(BALLS)}")


@torch.no_grad()
def tau(model: nn.Module, x: Tensor, threat: Threat, *, chunk: int = 256) -> Tau:
    """The mean over all i != j of t_i(x; j), the fall of z_j - z_i from its value at x to its bound.

    Args:
        threat: a ball.
    """
    _check(threat)
    check_task(model, x, None, threat)
    parts = [_tau(_outer(model, part, threat)) for part in x.split(chunk)]
    return Tau(torch.cat([part.boxed for part in parts]), torch.cat([part.plain for part in parts]))


def _tau(o: Outer) -> Tau:
    (count, classes), pairs = o.logits.shape, o.logits.shape[1] * (o.logits.shape[1] - 1)
    total = torch.zeros_like(o.rho)
    for j in range(classes):  # one class at a time: all of them would take K times the memory
        total = total + translations(o, torch.full((count,), j, device=o.rho.device)).sum(1)
    distances = torch.cdist(o.rows, o.rows, compute_mode="donot_use_mm_for_euclid_dist")
    return Tau(total / pairs, o.rho * distances.sum() / pairs)


def verification_boundary(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, attack_steps: int = 100
) -> Boundary:
    """Where one input stands between what attacks reach and what the bounds allow.

    Args:
        model: from (1, ...) to logits (1, K), in eval mode.
        x: one input, shape (1, ...).  y: its label, shape (1,).
        threat: a ball.
        attack_steps: steps of PGD from x, each a quarter of the budget, on cross-entropy and on the margin.
    """
    _check(threat)
    check_task(model, x, y, threat)
    if len(x) != 1:
        raise InputError(f"the picture shows one input, got a batch of {len(x)}; use x[i : i + 1] and y[i : i + 1]")
    with torch.no_grad():
        o = _outer(model, x, threat)
        other = o.logits.scatter(1, y[:, None], -torch.inf).argmax(1)
        both = torch.cat([y, other])
        logits, rows, radius = o.logits[0, both], o.rows[both], float(o.rho)
        gap = float(logits[0] - logits[1])
        boxed = gap - float(translations(o, y)[0, other])
        plain = gap - radius * float(torch.linalg.vector_norm(rows[0] - rows[1]))
        angles = torch.linspace(0, 2 * math.pi, POINTS + 1, dtype=torch.float64, device=x.device)
        values, vectors = torch.linalg.eigh((rows @ rows.T).double())
        root = vectors * values.clamp(min=0).sqrt()  # the ball maps to root (unit disc), as root root^T = rows rows^T
        outline = logits.double() + radius * torch.stack([angles.cos(), angles.sin()], 1) @ root.T
    attacked = {}
    for loss in ("ce", "margin"):
        step = threat.budget / 4
        found = pgd(model, x, y, threat, steps=attack_steps, step_size=step, loss=loss, random_start=False)
        with torch.no_grad():
            attacked[loss] = _pair(model(found.x_adv)[0, both])
    ellipse = tuple(_pair(point) for point in outline)
    return Boundary((int(y), int(other)), _pair(logits), boxed, plain, ellipse, attacked)


def _pair(values: Tensor) -> tuple[float, float]:
    first, second = values.tolist()
    return float(first), float(second)


def boundary_svg(b: Boundary, *, title: str = "Verification boundary", names: Sequence[str] | None = None) -> str:
    """The picture as SVG: the input is verified if the line of BCP lies above the decision line.

    Args:
        b: from `verification_boundary`.
        names: names of all classes; their numbers if None.
    """
    own, other = (str(c) if names is None else names[c] for c in b.classes)
    points = [*b.ellipse, b.logits, *b.attacked.values()]
    # Both axes have the same unit, and the decision line z_y = z_m is seen.
    ups, rights = [p[0] for p in points], [p[1] for p in points]
    width = 1.1 * max(max(ups) - min(ups), max(rights) - min(rights), 1e-6)
    middle = (max(rights) + min(rights)) / 2
    low = min(min(ups) - 0.05 * width, middle - width / 4)
    width = max(width, (max(ups) - low) * 1.05)
    left = middle - width / 2

    def across(z: float) -> float:
        return LEFT + SIZE * (z - left) / width

    def up(z: float) -> float:
        return TOP + SIZE * (1 - (z - low) / width)

    def line(offset: float, colour: str, dash: str, name: str) -> str:
        ends = f'x1="{across(left):.1f}" y1="{up(left + offset):.1f}"'
        ends += f' x2="{across(left + width):.1f}" y2="{up(left + width + offset):.1f}"'
        return f'<line {ends} clip-path="url(#panel)" {stroke(colour, dash)}><title>{escape(name)}</title></line>'

    lines = [
        (0.0, "#000000", "1 5", "decision"),
        (b.plain, "#0072b2", "7 4", f"ball alone: {b.plain:.3g}"),
        (b.boxed, "#d55e00", "", f"ball and box: {b.boxed:.3g}"),
    ]
    panel, whole = f'x="{LEFT}" y="{TOP}" width="{SIZE}" height="{SIZE}"', (LEFT + SIZE + LEGEND, TOP + SIZE + BOTTOM)
    parts = [
        f'<clipPath id="panel"><rect {panel}/></clipPath><rect {panel} fill="none" stroke="#999999"/>',
        text(LEFT, 18, title, size=15),
        text(LEFT + SIZE / 2, whole[1] - 10, f"logit of {other}", anchor="middle"),
        text(16, TOP + SIZE / 2, f"logit of {own} (label)", anchor="middle", turned=True),
    ]
    ticks = inner_rounds(left, left + width)
    parts += [text(across(tick), TOP + SIZE + 18, words, anchor="middle") for tick, words in ticks.items()]
    ticks = inner_rounds(low, low + width)
    parts += [text(LEFT - 7, up(tick) + 4, words, anchor="end") for tick, words in ticks.items()]
    outline = " ".join(f"{across(m):.1f},{up(y):.1f}" for y, m in b.ellipse)
    parts.append(f'<polygon points="{outline}" fill="#009e73" fill-opacity="0.15" stroke="#009e73"/>')
    parts += [line(*entry) for entry in lines]
    marks = [("input", b.logits, "#000000"), *((f"PGD, {k}", v, "#cc79a7") for k, v in b.attacked.items())]
    for name, (y, m), colour in marks:
        place = f'cx="{across(m):.1f}" cy="{up(y):.1f}"'
        parts.append(f'<circle {place} r="4" fill="{colour}"><title>{escape(name)}</title></circle>')
    beside = LEFT + SIZE + 16
    for i, (_, colour, dash, name) in enumerate(lines):
        y = TOP + 16 + 22 * i
        parts.append(f'<line x1="{beside}" x2="{beside + 26}" y1="{y}" y2="{y}" {stroke(colour, dash)}/>')
        parts.append(text(beside + 32, y + 4, name))
    for i, (colour, name) in enumerate((("#009e73", "image of the ball"), ("#000000", "input"), ("#cc79a7", "PGD"))):
        y = TOP + 16 + 22 * (len(lines) + i)
        parts.append(f'<circle cx="{beside + 13}" cy="{y}" r="4" fill="{colour}"/>')
        parts.append(text(beside + 32, y + 4, name))
    verdict = "verified" if b.boxed > 0 else "not verified"
    y = TOP + 16 + 22 * (len(lines) + 3)
    parts.append(f'<text x="{beside}" y="{y + 4}" font-weight="bold">{verdict}</text>')
    return figure(parts, *whole, title=title)

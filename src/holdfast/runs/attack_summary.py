"""What an attack run says about the model as a whole: numbers for a file, and a table for a reader."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from holdfast.runs.attack_files import Found


def summarize(found: Found, *, nearest: bool) -> dict[str, Any]:
    """Accuracies, which attack broke how many, and what it cost; distances where the `nearest` example was wanted."""
    inputs, right = len(found.index), int((found.by != "clean").sum())
    held = int((~found.success).sum())
    numbers: dict[str, Any] = {"inputs": inputs, "right": right, "held": held, "clean_accuracy": right / inputs}
    if nearest:
        numbers["distance"] = _quantiles(found.distance[found.by != "clean"])
    else:
        numbers["attacked_accuracy"] = held / inputs
    return numbers | {
        "broken_by": dict(Counter(name for name in found.by.tolist() if name).most_common()),
        "gradients": int(found.gradients.sum()),
        "queries": int(found.queries.sum()),
        "seconds": float(found.seconds.sum()),
    }


def _quantiles(distance: npt.NDArray[np.floating]) -> dict[str, float | None]:
    """Smallest, median (of an even number the larger one) and largest distance; None where no example was found."""
    ordered = np.sort(distance)
    picked = {"smallest": 0, "median": len(ordered) // 2, "largest": -1} if len(ordered) else {}
    return {key: float(ordered[i]) if np.isfinite(ordered[i]) else None for key, i in picked.items()}


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The content of `summary.json` for the screen, one line for each number."""
    inputs, right, held = (summary[key] for key in ("inputs", "right", "held"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("inputs", summary["drawn"])
    table.add_row("clean accuracy", f"{right} of {inputs} ({summary['clean_accuracy']:.1%})")
    if "attacked_accuracy" in summary:
        text = f"{held} of {inputs} ({summary['attacked_accuracy']:.1%})"
        table.add_row(f"accuracy under attack, {summary['threat']}", text)
    else:
        table.add_row("examples found", f"{right - held} of {right} inputs that are classified right")
        for key, value in summary["distance"].items():
            table.add_row(f"{key} {summary['norm']} distance", "no example found" if value is None else f"{value:.4g}")
    for name, count in summary["broken_by"].items():
        table.add_row("misclassified unchanged" if name == "clean" else f"broken by {name}", str(count))
    for key, text in (("gradients", "gradient evaluations"), ("queries", "queries")):
        table.add_row(text, f"{summary[key]} ({summary[key] / inputs:.1f} for each input)")
    return table

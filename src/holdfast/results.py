"""What the methods return: small frozen dataclasses of per-input tensors."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.utils.curves import curves, is_accuracy
from holdfast.utils.show import Shown, Svg, data_frame, html_table, latex_table, lines, percent

_SHOWN = 10  # epochs in the table of a notebook


@dataclass(frozen=True, eq=False, repr=False)
class AttackResult(Shown):
    """What an attack found.

    Attributes:
        x_adv: the strongest input found inside the threat set, shape of x. Where `success`, it is misclassified.
        success: (B,) bool. True where `x_adv` is not classified as `y`; misclassified clean inputs count.
        by: attack that broke each input: "clean" where x was misclassified already, "" where nothing broke it.
        gradients: (B,) int64, gradient evaluations spent on each input.
        queries: (B,) int64, forward passes spent on each input, including the passes of gradients.
        precision: "full", "bfloat16" if gradients far from the boundary were computed in it, or "full: " and the reason
            why not. Successes are decided in the model's own precision.
    """

    x_adv: Tensor
    success: Tensor
    by: tuple[str, ...]
    gradients: Tensor
    queries: Tensor
    precision: str = field(default="full", kw_only=True)


@dataclass(frozen=True, eq=False, repr=False)
class Bounds(Shown):
    """Bounds that hold for every output over the threat set: `lower`, `upper` of shape (B, K)."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class CertifyResult(Shown):
    """What a certificate proved.

    Attributes:
        certified: (B,) bool. True where no input of the threat set changes the class from `y`.
        margin: (B,) proven lower bound of min over classes j != y of z_y - z_j over the threat set.
        radius: (B,) largest radius proved, or None where the method does not search for it.
        alpha: probability that the statement for one input is wrong; 0 for a deterministic proof.
        by: name of the certificate that decided each input, by a proof or a counter-example; empty where none did.
        worst_place: (B, 2) row and column of the top left corner of a patch where the margin is smallest, or None for
            other threats and for certificates that do not look at each place.
        worst_class: (B,) the class j of that margin, or None.
        x_adv: counter-examples of a certificate that looks for them too, shape of x: inputs of the threat set that the
            model misclassifies, and x itself where none was found; None for other certificates.
        seed: fixes the noise of a proof that samples; None for a deterministic proof.
    """

    certified: Tensor
    margin: Tensor
    radius: Tensor | None = None
    alpha: float = 0.0
    by: tuple[str, ...] = ()
    worst_place: Tensor | None = None
    worst_class: Tensor | None = None
    x_adv: Tensor | None = None
    seed: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Shown):
    """How much each value of an input contributes to the answer of the model.

    Attributes:
        attribution: signed, shape of x.
        ok: (B,) bool. True where the method kept its promise: a boundary was found, the completeness error is small.
        error: (B,) completeness error |sum A - (f(x) - f(b))| / |f(x) - f(b)|; NaN for methods without a baseline b.
        gradients: (B,) int64, gradient evaluations spent on each input; for methods without gradients, model passes.
        by: what was explained, for each input, and by which fallback where `ok` is False.
        slope: the gradient, averaged over the path (the attribution without its factor x - b), shape of x, or None.
        boundary: the nearest point found that the model puts into another class, shape of x, or None; x itself where
            none was found.
        distance: (B,) distance from x to `boundary`, infinite where none was found; or None.
    """

    attribution: Tensor
    ok: Tensor
    error: Tensor
    gradients: Tensor
    by: tuple[str, ...]
    slope: Tensor | None = None
    boundary: Tensor | None = None
    distance: Tensor | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Verdict:
    """The answer to a property.

    Attributes:
        status: "holds" (proved for every input of the regions), "violated" (`counterexample` shows it) or "unknown".
        counterexample: one input, without a batch, as the model takes it; else None.
        output: (K,), what the model returns for the counter-example; else None.
        bound: proven lower bound of how far the outputs stay away from a violation: positive where the property holds.
        splits: sub-problems that were bounded.
        seconds: time spent.
        note: what else there is to say: the region is empty, the counter-example is within rounding of the boundary.
        late: True if time ran out.
    """

    status: Literal["holds", "violated", "unknown"]
    counterexample: Tensor | None
    output: Tensor | None
    bound: float
    splits: int
    seconds: float
    note: str = ""
    late: bool = False

    def __repr__(self) -> str:
        note = f", {self.note}" if self.note else ""
        return f"Verdict({self.status}, bound={self.bound:.4g}, splits={self.splits}, {self.seconds:.2f} s{note})"


class History(list[dict[str, Any]]):
    """A training run as a list with one dict per epoch, which shows itself as a table and as curves."""

    def __repr__(self) -> str:
        first, last = (self[0], self[-1]) if self else ({}, {})
        about = {
            key: f"{_figure(key, first.get(key))} in the first epoch, {_figure(key, last.get(key))} in the last"
            for key in self._columns()[1:]
        }
        return lines(self._title(), about)

    def _repr_html_(self) -> str:
        columns, rows = self._table()
        title = self._title() + (f"; the last {_SHOWN}" if len(self) > _SHOWN else "")
        return (self.plot()._repr_html_() if self else "") + html_table(title, columns, rows[-_SHOWN:])

    def plot(self) -> Svg:
        """Draw the loss and the validation accuracies over the epochs."""
        return Svg(curves(self, self._title()), self._title())

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with every figure, one row per epoch."""
        return data_frame(self)

    def to_latex(self) -> str:
        """Return the main figures as a LaTeX table, one row per epoch."""
        return latex_table(self._title(), *self._table())

    def _title(self) -> str:
        return f"Training history of {len(self)} epoch{'' if len(self) == 1 else 's'}"

    def _columns(self) -> list[str]:
        """The figures that a table has room for: loss, accuracies, time."""
        keys = dict.fromkeys(key for row in self for key in row)
        main = [key for key in keys if key in ("train_loss", "train_accuracy", "seconds") or is_accuracy(key)]
        return ["epoch", *main]

    def _table(self) -> tuple[list[str], list[list[str]]]:
        columns = self._columns()
        return [c.replace("_", " ") for c in columns], [[_figure(c, row.get(c)) for c in columns] for row in self]


def _figure(key: str, value: Any) -> str:
    """One figure of an epoch as text."""
    if value is None:
        return ""
    return percent(value) if key == "train_accuracy" or is_accuracy(key) else f"{value:.4g}"


@dataclass(frozen=True, eq=False, repr=False)
class TrainResult(Shown):
    """A trained model, its history (one row per epoch) and the folder of the run, if it was kept."""

    model: nn.Module
    history: History
    path: Path | None

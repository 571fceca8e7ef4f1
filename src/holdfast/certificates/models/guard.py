"""A model for deployment that answers only what it can prove."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.certificates import Smoothed, certify, prove
from holdfast.checks import check_logits, check_model, check_task
from holdfast.errors import UnsupportedError
from holdfast.registry import Certificate, get, methods
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.options import check_options, options_of
from holdfast.utils.show import Shown

ABSTAIN = -1


@dataclass(frozen=True, eq=False, repr=False)
class GuardResult(Shown):
    """What a guarded model says about each input.

    Attributes:
        prediction: (B,) int64, the class, or -1 for no answer.
        certified: (B,) bool, where there is an answer: it is proved for the whole threat set.
        radius: (B,) how far the proof reaches, at least the budget of the threat; 0 where there is no answer.
    """

    prediction: Tensor
    certified: Tensor
    radius: Tensor


class Guard(nn.Module):
    """See `guard`, which makes it."""

    def __init__(self, model: nn.Module, threat: Threat, method: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.threat, self.method, self.options = model, threat, method, options

    def extra_repr(self) -> str:
        return f"threat='{self.threat}', method='{self.method}'"

    @torch.no_grad()
    def forward(self, x: Tensor) -> GuardResult:
        """From inputs (B, ...) in the threat's valid range to answers; B may be 0."""
        check_model(self.model)
        if len(x) == 0:
            none = x.new_zeros(0)
            return GuardResult(none.long(), none.bool(), none)
        label, result = self._proved(x)
        certified = result.certified
        if _own(self.model) is not None:  # that a rejection is certain is no answer
            certified = certified & (label < cast(int, self.model.classes))
        proved = result.margin.new_full((len(x),), self.threat.budget)
        if result.radius is not None:
            proved = torch.maximum(proved, result.radius)
        return GuardResult(
            torch.where(certified, label, ABSTAIN), certified, torch.where(certified, proved, torch.zeros_like(proved))
        )

    def _proved(self, x: Tensor) -> tuple[Tensor, CertifyResult]:
        """The predicted classes (B,) and their certificate."""
        if isinstance(self.model, Smoothed):  # its certificate looks inside, and has no use for its votes
            label = check_logits(self.model, x).argmax(1)
            return label, certify(self.model, x, label, self.threat, self.method, **self.options)
        unknown = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        logits = check_task(self.model, x, unknown, self.threat, chunk=self.options.get("chunk"))
        label = logits.argmax(1)
        return label, prove(self.model, x, label, self.threat, self.method, logits, **self.options)


def _own(model: nn.Module) -> Certificate | None:
    """The certificate that is made for models of this class only, if there is one."""
    return next((e for e in methods("certify") if e.module is not None and isinstance(model, e.module)), None)


def guard(model: nn.Module, threat: Threat | str, method: str = "auto", **options: Any) -> nn.Module:
    """A module that answers with a class and a certified radius, or abstains.

    It answers where the certificate proves that no input of the threat set changes the predicted class. Two inputs with
    different answers are therefore no closer than the threat reaches. That the answer is right is not proved.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. The guard shares its weights: `.to(device)` and
            `.state_dict()` work as usual.
        threat: what the adversary may do.
        method: a name from `hf.methods("certify")`; "auto" is "centroid" for a `CentroidNet`, whose rejections abstain.
        **options: options of `hf.certify` and of the method, such as chunk=64.

    Returns:
        A module from inputs (B, ...) to a `GuardResult`, in eval mode. It has no gradients.

    Example:
        >>> from holdfast.threats import Linf
        >>> model = nn.Linear(2, 2).eval()
        >>> model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
        >>> answers = guard(model, Linf(0.1))(torch.tensor([[0.9, 0.1], [0.5, 0.45]]))
        >>> answers.prediction.tolist()
        [0, -1]
    """
    check_model(model)
    threat = read_threat(threat)
    own = _own(model)
    method = own.name if method == "auto" and own is not None else method
    door, entry = options_of(certify), get("certify", method)
    check_options(door, {name: value for name, value in options.items() if name in door}, "call of guard")
    entry.check(threat, {name: value for name, value in options.items() if name not in door})
    if entry.smoothed and not isinstance(model, Smoothed):
        raise UnsupportedError(
            f"'{method}' proves what a smoothed classifier answers, not what the model does; guard that classifier: "
            "hf.guard(hf.Smoothed(model, sigma), threat, 'smoothing')"
        )
    return Guard(model, threat, method, options).eval()

"""Derandomised smoothing against patches: the network sees one band or block at a time, and the positions vote.

Class c gets n_c votes, one from each position in which its probability is above a threshold; the most votes win, of
equals the class that comes first. A patch changes only what the positions see that it touches, so all others vote as
before (Levine and Feizi, "(De)randomized smoothing for certifiable defense against patch attacks", 2020). With A the
positions that a patch at one place touches, and a_c the votes of c among them, c = y still wins if for all j != y

    n_y - a_y >= n_j - a_j + |A| + 1[j < y].

The certificate asks this of every place. The paper asks n_y >= n_j + 2 |A| + 1[j < y]; since a_y <= |A| and a_j >= 0,
that proves no more.
"""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.certificates.smoothing.ablation import Part, ablate, windows
from holdfast.checks import check_logits
from holdfast.errors import InputError
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Patch
from holdfast.utils.options import Count, Fraction, check_options, options_from, options_of


class BandVotes(nn.Module):
    """The smoothed classifier itself: votes of each class over all positions of the window, (B, C, H, W) -> (B, K).

    `argmax` takes the first of equals, as the certificate does. The votes are counts and have no gradient. The model is
    trained on ablated images; the options are those of the certificate `smoothing-patch`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        part: Part = "column",  # what the network sees of the image
        size: Count = 4,  # width of the column, height of the row, side of the block
        threshold: Fraction = 0.3,  # a position votes for each class whose probability is above it, if there is any
        null: float = 0.5,  # value of ablated pixels, as in training
        chunk_views: Count = 1024,  # ablated images in memory at a time
    ) -> None:
        super().__init__()
        check_options(options_of(BandVotes.__init__), {"threshold": threshold, "chunk_views": chunk_views}, "BandVotes")
        self.model, self.part, self.size = model, part, size
        self.threshold, self.null, self.chunk_views = threshold, null, chunk_views

    def extra_repr(self) -> str:
        return f"part={self.part!r}, size={self.size}, threshold={self.threshold:g}, null={self.null:g}"

    def forward(self, x: Tensor) -> Tensor:
        return self.votes(x).sum((2, 3)).to(x)

    @torch.no_grad()
    def votes(self, x: Tensor) -> Tensor:
        """Which position votes for which class, (B, K, P, Q), bool; P x Q positions."""
        if x.ndim != 4:
            raise InputError(f"bands and blocks are parts of images (B, C, H, W), got an input of {tuple(x.shape)}")
        rows, columns = windows(self.part, self.size, x.shape[2], x.shape[3])
        keep = (rows[:, None, :, None] & columns[None, :, None, :]).flatten(0, 1)[:, None].to(x.device)

        def look(some: Tensor) -> Tensor:
            logits = check_logits(self.model, ablate(x[:, None], some, self.null).flatten(0, 1))
            return (logits.softmax(1) > self.threshold).view(len(x), len(some), logits.shape[1])

        votes = torch.cat([look(some) for some in keep.split(max(1, self.chunk_views // max(1, len(x))))], 1)
        return votes.transpose(1, 2).reshape(len(x), votes.shape[2], len(rows), len(columns))


@Certificate(
    "smoothing-patch",
    summary="derandomised smoothing: bands or blocks of the image vote, and a patch touches few of them",
    threats=("patch",),
    reference="Levine and Feizi, (De)randomized smoothing for certifiable defense against patch attacks, 2020",
    smoothed=True,
)
@options_from(BandVotes.__init__)
def smoothing_patch(
    model: nn.Module, x: Tensor, y: Tensor, threat: Patch, *, every_place: bool = True, **options: Any
) -> CertifyResult:
    """Certified if no patch can keep y from winning the vote; a proof about `BandVotes`, not about the model itself.

    With `every_place` it looks at the votes that a patch touches at each place; without, it is the test of the paper.

    Returns:
        `margin` in votes: the least n_y - n_j over all patches, plus (j - y) / K, which breaks ties as the vote does.
    """
    smoothed = BandVotes(model, **options)
    votes = smoothed.votes(x).double()
    threat.locations(tuple(x.shape[1:]))  # refuses a patch that does not fit
    rows, columns = (axis.to(x.device) for axis in windows(smoothed.part, smoothed.size, x.shape[2], x.shape[3]))
    touched = _touched(rows, threat.height), _touched(columns, threat.width)
    area = touched[0].sum(1)[:, None] * touched[1].sum(1)
    total = votes.sum((2, 3))[..., None, None]
    # The votes that are safe from a patch at each place, (B, K, places, places).
    left = total - touched[0] @ votes @ touched[1].T if every_place else total
    gain = area if every_place else 2 * area.max()
    own = left.gather(1, y[:, None, None, None].expand(-1, 1, *left.shape[2:]))
    worst = (own - left - gain).amin((2, 3))
    classes = torch.arange(votes.shape[1], device=x.device)
    margins = worst + (classes - y[:, None]) / votes.shape[1]
    margin = margins.scatter(1, y[:, None], torch.inf).amin(1).to(x.dtype)
    return CertifyResult(margin > 0, margin, by=tuple("smoothing-patch" if m > 0 else "" for m in margin.tolist()))


def _touched(kept: Tensor, patch: int) -> Tensor:
    """Which positions see a cell under the patch from each of its places, (places, P) of ones and zeros, float64.

    `kept` (P, n) holds the cells of each position along one axis of the image.
    """
    n = kept.shape[1]
    place, cell = torch.arange(n - patch + 1, device=kept.device)[:, None], torch.arange(n, device=kept.device)
    under = (cell >= place) & (cell < place + patch)
    return (under.double() @ kept.double().T > 0).double()

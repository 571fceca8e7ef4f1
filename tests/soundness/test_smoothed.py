"""Every certificate of a smoothed classifier meets an attack on that classifier: inside, y keeps its majority."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.certificates.smoothing.ablation import ablate, windows
from holdfast.certificates.smoothing.smoothing import gaussian
from holdfast.certificates.smoothing.smoothing_l0 import ablation_noise
from holdfast.certificates.smoothing.smoothing_l1 import l1_noise
from holdfast.certificates.smoothing.smoothing_patch import BandVotes

SIDE, COPIES = 5, 64
OPTIONS = {"n": 2000, "n0": 50, "alpha": 1e-6}
PAIRS = {
    "smoothing": (hf.L2(0.3), {"sigma": 0.5, **OPTIONS}, "pgd", gaussian(0.5)),
    "smoothing-l1": (hf.L1(0.3), {"scale": 0.8, **OPTIONS}, "pgd", l1_noise("uniform", 0.8)),
    "smoothing-l0": (hf.Sparse(1), {"size": 5, **OPTIONS}, "sparse-pgd", ablation_noise(5, 0.5)),
    "smoothing-patch": (hf.Patch(1, 1), {"size": 2}, "patch-pgd", None),
}


class SoftVote(nn.Module):
    """What a gradient attack can climb: the log of the mean softmax over copies that stay the same."""

    def __init__(self, model, draw):
        super().__init__()
        self.model, self.draw = model, draw

    def copies(self, x):
        if self.draw is None:  # all bands of two columns
            _, columns = windows("column", 2, SIDE, SIDE)
            return torch.stack([ablate(x, keep, 0.5) for keep in columns], 1)
        return torch.stack([self.draw(one, COPIES, torch.Generator().manual_seed(0)) for one in x])

    def forward(self, x):
        copies = self.copies(x)
        return self.model(copies.flatten(0, 1)).softmax(1).unflatten(0, copies.shape[:2]).mean(1).log()


def model_of(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    with torch.no_grad():
        net[3].weight *= 4
        net[3].bias[seed] += 2  # so that some class wins on bands and few pixels too
    return net


def test_no_certificate_of_a_smoothed_classifier_is_left_out():
    assert set(PAIRS) == {method.name for method in hf.methods("certify") if method.smoothed}


@pytest.mark.parametrize("name", PAIRS)
def test_y_keeps_its_majority_where_it_is_certified(name):
    threat, options, attack, draw = PAIRS[name]
    met = 0
    for seed in range(3):
        model, x = model_of(seed), torch.rand(12, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
        vote = SoftVote(model, draw).eval()
        y = vote(x).argmax(1)
        certified = hf.certify(model, x, y, threat, name, **options).certified
        x, y = x[certified], y[certified]
        met += len(x)
        if len(x) == 0:
            continue
        x_adv = hf.attack(vote, x, y, threat, attack, seed=seed).x_adv
        if draw is None:
            assert torch.equal(BandVotes(model, size=2)(x_adv).argmax(1), y)
            continue
        fresh = torch.stack([draw(one, 4000, torch.Generator().manual_seed(99)) for one in x_adv])
        hits = (model(fresh.flatten(0, 1)).argmax(1).view(len(x), -1) == y[:, None]).sum(1)
        assert int(hits.min()) > 2000 - 4 * 32  # one half less four standard deviations of the count
    assert met >= 5

"""Square Attack against a model that answers each query with a new draw: random search with queries that it averages.

A black-box attacker cannot ask for the same draw twice. It can ask the same question several times: `samples` draws are
the price of one look, and all of them count as queries.
"""

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from holdfast.attacks.core.chance import log_mean_softmax, mean_prediction, seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.stages import Stage, run_stages
from holdfast.attacks.core.survivors import broken_by
from holdfast.attacks.eot import draw_seed
from holdfast.attacks.square import square
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils import clock
from holdfast.utils.options import Count, Share


class FreshMean(nn.Module):
    """A random model as an oracle: the log of the mean softmax over the `samples` draws that come next, (B, K)."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self.model, self.samples = model, samples
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return log_mean_softmax(self.model, x, self.samples)


@Attack(
    "eot-square",
    summary="Square Attack on a random model: each look averages over fresh draws, which all count as queries",
    threats=("linf", "l2", "l1"),
    reference="Andriushchenko et al., Square Attack: a query-efficient black-box adversarial attack via random "
    "search, 2020; Athalye et al., Synthesizing robust adversarial examples, 2018",
    stochastic=True,
    gradients="none",
)
@on_task
def eot_square(
    task: Task,
    *,
    queries: Count = 5000,
    samples: Count = 10,
    p_init: Share = 0.8,
    restarts: Count = 3,
    votes: Count = 20,
) -> AttackResult:
    """Search at random with at most `queries` passes in all; an example counts if `votes` fresh draws confirm it.

    A look that is wrong by luck ends a search, so that what the votes refuse is searched again: each restart gets an
    equal share of the queries. The votes are the defender's answer, and not part of the attacker's budget; the result
    counts them, too.

    Args:
        queries: most draws that the attacker may ask for on one input, over all restarts.
        samples: draws averaged in each look; 1 is the bare oracle.
        p_init: share of the image in the first windows.
        restarts: searches in all.
        votes: draws that decide whether an example counts.
    """
    model, x, y, threat, noise = task
    looks = queries // (samples * restarts)
    if looks < 1:
        raise InputError(f"{queries} queries are too few for {restarts} restarts of {samples} draws for each look")
    oracle = FreshMean(model, samples)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        seed = draw_seed(noise, restart)
        with seeded(seed, x.device):
            found = square(oracle, x, y, threat, noise=noise.fork(restart), queries=looks, p_init=p_init)
        fooled = mean_prediction(model, found.x_adv, votes, seed + 1).argmax(1) != y
        spent = samples * found.queries + votes
        return replace(found, success=fooled, by=broken_by("eot-square", fooled), queries=spent)

    stages: list[Stage] = [partial(run, restart) for restart in range(restarts)]
    return run_stages(x, y, noise, stages if not clock.over() else [])

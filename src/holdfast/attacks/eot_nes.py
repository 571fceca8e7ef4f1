"""NES against a model that answers each query with a new draw: the probes of an estimate average over draws too."""

from dataclasses import replace

from torch import Tensor

from holdfast.attacks.core.chance import mean_prediction, seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.stages import run_restarts
from holdfast.attacks.core.survivors import broken_by
from holdfast.attacks.eot import draw_seed
from holdfast.attacks.eot_square import FreshMean
from holdfast.attacks.nes import nes
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.utils.options import Count, Even, Positive


@Attack(
    "eot-nes",
    summary="NES on a random model: estimates gradients from outputs, each with fresh draws",
    threats=("linf", "l2"),
    reference="Ilyas et al., Black-box adversarial attacks with limited queries and information, 2018; Athalye et al., "
    "Synthesizing robust adversarial examples, 2018",
    stochastic=True,
    gradients="none",
)
@on_task
def eot_nes(
    task: Task,
    *,
    queries: Count = 5000,
    samples: Count = 1,
    probes: Even = 50,
    sigma: Positive = 0.01,
    restarts: Count = 2,
    votes: Count = 20,
) -> AttackResult:
    """Ascend estimated gradients with at most `queries` passes in all; `votes` fresh draws confirm each example.

    The two ends of a probe get different draws, so that sigma must be large beside the noise of one answer. Its
    estimate is unbiased, and averages over draws by itself: `samples` is 1.

    Args:
        queries: most draws that the attacker may ask for on one input, over all restarts.
        samples: draws averaged in each look.
        probes: looks for one estimate, two for each direction; fewer if the queries do not allow as many.
        sigma: standard deviation of the probes, per value.
        restarts: runs in all, each with an equal share of the queries.
        votes: draws that decide whether an example counts.
    """
    model, x, y, threat, noise = task
    looks = queries // (samples * restarts)
    probes = min(probes, (looks - 2) // 2 * 2)  # one look at the start, one at the end
    if probes < 2:
        raise InputError(f"{queries} queries are too few for {restarts} restarts of two probes of {samples} draws")
    oracle = FreshMean(model, samples)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        seed = draw_seed(noise, restart)
        with seeded(seed, x.device):
            how = {"queries": looks, "samples": probes, "sigma": sigma, "steps": looks // probes}
            found = nes(oracle, x, y, threat, noise=noise.fork(restart), **how)
        fooled = mean_prediction(model, found.x_adv, votes, seed + 1).argmax(1) != y
        spent = samples * found.queries + votes
        return replace(found, success=fooled, by=broken_by("eot-nes", fooled), queries=spent)

    return run_restarts(x, y, noise, restarts, run)

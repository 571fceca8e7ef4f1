"""Masked gradients: what attacks report on a model that does not hold, once its gradients are hidden.

One model of standard training, at a budget where hardly anything survives, and wrappers that change next to nothing of
what it predicts: rounding of its input to 8 bits, logits times 1000, a softmax at its end (plain, and of logits times
100), Gaussian noise on its input. A figure far above that of the bare model is a failure of the attack.

Contenders: `cascade` of Holdfast with `holdfast.attacks.core.indicators`, PGD of torchattacks, foolbox and ART
(40 steps of 2.5 eps / steps from a random point, the same for all), and AutoAttack of torchattacks on fewer inputs. All
examples of the peers are checked for the budget. A random model is judged by its mean softmax over 100 draws, for
everybody.

    pip install --no-deps torchattacks foolbox eagerpy adversarial-robustness-toolbox    # none may replace torch
    pip install requests gitpython scikit-learn six tqdm

    python benchmarks/attack_models.py --folder MODELS --data ROOT --only mnist-standard
    python benchmarks/masked.py --models MODELS --data ROOT
"""

import argparse
import contextlib
import io
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from attack_models import SPECS, load
from common import RESULTS, Neighbours, describe_markdown, describe_run, markdown_table, write_results
from torch import Tensor, nn

import holdfast as hf
from holdfast.attacks.core import indicators as trust
from holdfast.attacks.eot import is_stochastic, mean_prediction, seeded
from holdfast.data import Split

NAME = "masked"
MODEL = "mnist-standard"
BARE = "none"
STEPS, VOTES, DRAWS, POINTS = 40, 100, 16, 3.0
SLOW = ("8 bits", "softmax of logits x 100")  # masks that AutoAttack of torchattacks gets
PACKAGES = ("holdfast", "torch", "torchattacks", "foolbox", "adversarial-robustness-toolbox")

Attack = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


# --- Masks ------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A model behind a function of its input and before one of its logits."""

    def __init__(self, model: nn.Module, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        """Logits or probabilities (B, K) for x (B, ...)."""
        return self.after(self.model(self.before(x)))


def same(values: Tensor) -> Tensor:
    """No mask."""
    return values


def masks(model: nn.Module, sigma: float) -> dict[str, tuple[nn.Module, str]]:
    """Each masked model, and the indicator that should name its mask."""
    return {
        BARE: (model, ""),
        "8 bits": (Masked(model, lambda x: (255 * x).round() / 255, same), "step-function"),
        "logits x 1000": (Masked(model, same, lambda z: 1000 * z), "saturated-loss"),
        "softmax": (Masked(model, same, lambda z: z.softmax(1)), "softmax"),
        "softmax of logits x 100": (Masked(model, same, lambda z: (100 * z).softmax(1)), "softmax"),
        f"noise {sigma:g}": (Masked(model, lambda x: x + sigma * torch.randn_like(x), same), "stochastic"),
    }


# --- Peers ------------------------------------------------------------------------------------------------------------


def torchattacks_pgd(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """PGD of torchattacks."""
    import torchattacks

    x_adv: Tensor = torchattacks.PGD(model, eps=eps, alpha=2.5 * eps / STEPS, steps=STEPS, random_start=True)(x, y)
    return x_adv


def foolbox_pgd(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """PGD of foolbox."""
    import foolbox

    attack = foolbox.attacks.LinfPGD(abs_stepsize=2.5 * eps / STEPS, steps=STEPS, random_start=True)
    x_adv: Tensor = attack.run(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilon=eps)
    return x_adv


def art_pgd(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """PGD of ART."""
    from art.attacks.evasion import ProjectedGradientDescentPyTorch
    from art.estimators.classification import PyTorchClassifier

    loss, shape = nn.CrossEntropyLoss(), tuple(x.shape[1:])
    wrapped = PyTorchClassifier(
        model, loss, input_shape=shape, nb_classes=10, clip_values=(0.0, 1.0), device_type="cpu"
    )
    options = {"eps": eps, "eps_step": 2.5 * eps / STEPS, "max_iter": STEPS, "num_random_init": 1}
    attack = ProjectedGradientDescentPyTorch(wrapped, batch_size=len(x), verbose=False, **options)
    return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))


def torchattacks_autoattack(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """AutoAttack of torchattacks, in the version that it offers for the kind of model."""
    import torchattacks

    version = "rand" if is_stochastic(model, x) else "standard"
    attack = torchattacks.AutoAttack(model, norm="Linf", eps=eps, version=version, n_classes=10, seed=0)
    x_adv: Tensor = attack(x, y)
    return x_adv


PEERS: dict[str, Attack] = {"torchattacks PGD": torchattacks_pgd, "foolbox PGD": foolbox_pgd, "ART PGD": art_pgd}
AUTOATTACK = "torchattacks AutoAttack"


@torch.no_grad()
def holds(model: nn.Module, part: Split, threat: hf.Linf, x_adv: Tensor) -> list[bool]:
    """Which inputs are classified right, or have an example outside of the budget (with some room for rounding)."""
    outside = threat.distance(x_adv, part.x) > threat.eps + 1e-6
    votes = mean_prediction(model, x_adv, VOTES, seed=1) if is_stochastic(model, part.x) else model(x_adv)
    flags: list[bool] = (outside | (votes.argmax(1) == part.y)).tolist()
    return flags


# --- Measuring --------------------------------------------------------------------------------------------------------


def timed(run: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What it returns, the seconds of the processor, and how many cores others kept busy."""
    neighbours, cpu = Neighbours(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):  # a peer prints
        result = run()
    return result, {"cpu_seconds": round(time.process_time() - cpu, 2), "others": neighbours.cores()}


def run_peer(attack: Attack, model: nn.Module, part: Split, threat: hf.Linf) -> dict[str, Any]:
    """Accuracy in per cent after one attack of a peer."""
    torch.manual_seed(0)
    numpy.random.seed(0)  # noqa: NPY002  (ART draws from the global generator)
    x_adv, cell = timed(lambda: attack(model, part.x, part.y, threat.eps))
    return {"accuracy": _percent(holds(model, part, threat, x_adv)), "inputs": len(part), **cell}


def run_ours(model: nn.Module, part: Split, threat: hf.Linf, flag: str) -> tuple[dict[str, Any], hf.AttackResult]:
    """Accuracy in per cent after `cascade`, the indicators that fired and the verdict on it; and its result."""
    result, cell = timed(lambda: hf.attack(model, part.x, part.y, threat, "cascade"))
    signs, probing = timed(lambda: trust.indicators(model, part.x, part.y, threat, result))
    fired = [sign.name for sign in signs if sign.fired]
    cell = {
        "accuracy": _percent((~result.success).tolist()),
        "judged": _percent(holds(model, part, threat, result.x_adv)),
        "inputs": len(part),
        **cell,
        "indicator_cpu_seconds": probing["cpu_seconds"],
        "fired": fired,
        "values": {sign.name: round(sign.value, 4) for sign in signs},
        "verdict": trust.verdict(signs)._asdict(),
        "named": flag in fired if flag else None,
    }
    return cell, result


class FixedDraws(nn.Module):
    """The log of the summed softmax of a model over a few draws of noise, which are the same for all inputs."""

    def __init__(self, model: nn.Module, sigma: float) -> None:
        super().__init__()
        self.model, self.sigma = model, sigma

    def forward(self, x: Tensor) -> Tensor:
        """(B, K) for x (B, ...)."""
        with seeded(3, x.device):
            noise = self.sigma * torch.randn(DRAWS, 1, *x.shape[1:])
        logits = self.model((x + noise).flatten(0, 1))
        return logits.view(DRAWS, len(x), -1).log_softmax(2).logsumexp(0)


def after_targeted(
    model: nn.Module, noisy: nn.Module, sigma: float, part: Split, threat: hf.Linf, result: hf.AttackResult
) -> float:
    """Accuracy in per cent of the noisy model once targeted Auto-PGD on fixed draws has tried what `cascade` left.

    It tells how much of the distance to the bare model is the attack's.
    """
    left = part[(~result.success).nonzero()[:, 0]]
    x_adv = hf.attack(FixedDraws(model, sigma).eval(), left.x, left.y, threat, "apgd-t", steps=STEPS).x_adv
    return round(100 * sum(holds(noisy, left, threat, x_adv)) / len(part), 1)


@torch.no_grad()
def also_bare(
    model: nn.Module, part: Split, threat: hf.Linf, bare: hf.AttackResult, rounded: hf.AttackResult
) -> tuple[int, int]:
    """Inputs broken only behind the rounding, and those of them whose rounded example breaks the bare model too."""
    only = (rounded.success & ~bare.success).nonzero()[:, 0]
    held = holds(model, part[only], threat, (255 * rounded.x_adv[only]).round() / 255) if len(only) else []
    return len(only), len(only) - sum(held)


def _percent(flags: list[bool]) -> float:
    return round(100 * statistics.mean(flags), 1)


def measure(model: nn.Module, part: Split, threat: hf.Linf, sigma: float, few: int, slow: list[str]) -> dict[str, Any]:
    """Everything for every mask; AutoAttack on the first `few` inputs of the masks in `slow`."""
    rows: dict[str, Any] = {}
    for mask, (masked, flag) in masks(model, sigma).items():
        masked.eval()
        row = {"clean": _percent(holds(masked, part, threat, part.x)), "flag": flag}
        row["ours"], result = run_ours(masked, part, threat, flag)
        if mask == BARE:
            bare = result
        row["peers"] = {name: run_peer(attack, masked, part, threat) for name, attack in PEERS.items()}
        if mask in slow:
            row["peers"][AUTOATTACK] = run_peer(torchattacks_autoattack, masked, part[:few], threat)
            row["peers"][AUTOATTACK]["ours"] = _percent((~result.success[:few]).tolist())
        if flag == "stochastic":
            row["after_targeted"] = after_targeted(model, masked, sigma, part, threat, result)
        if flag == "step-function":
            row["only_masked"], row["also_bare"] = also_bare(model, part, threat, bare, result)
        apart = row["ours"]["accuracy"] - (rows[BARE] if rows else row)["ours"]["accuracy"]
        row["apart"], row["met"] = round(apart, 1), None
        if flag:
            row["met"] = row["ours"]["named"] and (flag == "stochastic" or abs(apart) <= POINTS)
        rows[mask] = row
        seconds = {name: cell["cpu_seconds"] for name, cell in row["peers"].items()}
        print(mask, row["clean"], row["ours"]["accuracy"], row["ours"]["fired"], flush=True)
        print({name: cell["accuracy"] for name, cell in row["peers"].items()}, seconds, flush=True)
    return rows


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    rows, setting = record["masks"], record["setting"]
    names = [*PEERS, AUTOATTACK]
    accuracies = [
        (mask, row["clean"], *(_accuracy(row["peers"].get(name)) for name in names), f"{row['ours']['accuracy']:.1f}")
        for mask, row in rows.items()
    ]
    verdicts = [
        (
            mask,
            f"{row['apart']:+.1f}" if row["flag"] else "",
            ", ".join(row["ours"]["fired"]) or "none",
            row["ours"]["verdict"]["level"],
            row["flag"],
            {None: "", True: "yes", False: "no"}[row["met"]],
        )
        for mask, row in rows.items()
    ]
    seconds = [
        (
            mask,
            *(f"{row['peers'][name]['cpu_seconds']:.1f}" if name in row["peers"] else "" for name in names),
            f"{row['ours']['cpu_seconds']:.1f}",
            f"{row['ours']['indicator_cpu_seconds']:.1f}",
        )
        for mask, row in rows.items()
    ]
    few = {row["peers"][AUTOATTACK]["inputs"] for row in rows.values() if AUTOATTACK in row["peers"]}
    bits, noise = (next(row for row in rows.values() if row["flag"] == f) for f in ("step-function", "stochastic"))
    return "\n\n".join(
        [
            "# Masked gradients",
            f"Accuracy in per cent that each attack leaves on {setting['inputs']} test inputs of {MODEL}, linf "
            f"{setting['eps']:.4f} ({setting['levels']}/255)"
            + (
                f"; AutoAttack of torchattacks on the first {few.pop()} and for some masks only, with ours "
                "on the same inputs in brackets"
                if few
                else ""
            )
            + ". The masks change next to nothing of what the model predicts: a figure far above the first row's is a "
            "failure of the attack.",
            describe_markdown(record["run"]),
            markdown_table(("mask", "clean", *names, "ours, cascade"), accuracies),
            f"Ours, in detail. Apart: points from the bare model's figure; bar: at most {POINTS:g}, and the mask is "
            "flagged by its name. For noise only the flag is required.",
            markdown_table(("mask", "apart", "indicators fired", "verdict", "to be flagged", "met"), verdicts),
            "Rounding to 8 bits changes the function a little: what the model sees is the nearest multiple of 1/255. "
            "The budget is such a multiple and so are the test inputs, so that rounding takes no point out of the "
            "ball, but only its points on the grid remain. Inputs that ours broke behind the rounding and not on the "
            f"bare model: {bits['only_masked']}, of which the rounded example breaks the bare model too: "
            f"{bits['also_bare']}. The bare model's figure is too high by the latter.",
            f"The noisy model is judged by its mean softmax over {VOTES} draws. Noise of this size does not hide "
            "gradients: plain PGD reports about the same as ours. On what ours left, targeted Auto-PGD on "
            f"{DRAWS} fixed draws brings the accuracy down to {noise['after_targeted']:.1f}: that part of the "
            "distance to the bare model is the attack's; of the rest this says nothing.",
            "CPU seconds of the attacks, and of the indicators, which probe 64 inputs.",
            markdown_table(("mask", *names, "ours, cascade", "indicators"), seconds),
        ]
    )


def _accuracy(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f"{cell['accuracy']:.1f}" + (f" ({cell['ours']:.1f})" if "ours" in cell else "")


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description="Attack a model whose gradients are masked, with ours and with peers.")
    parser.add_argument("--models", type=Path, required=True, help="folder written by attack_models.py")
    parser.add_argument("--data", type=Path, required=True, help="root of MNIST")
    parser.add_argument("--levels", type=int, default=28, help="budget in units of 1/255 (default: 28)")
    parser.add_argument("--sigma", type=float, default=0.05, help="of the Gaussian noise (default: 0.05)")
    parser.add_argument("--inputs", type=int, default=200, help="first test inputs (default: 200)")
    parser.add_argument("--few", type=int, default=100, help="inputs for AutoAttack of torchattacks (default: 100)")
    parser.add_argument("--slow", nargs="*", default=list(SLOW), help="masks that AutoAttack of torchattacks gets")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the results (default: benchmarks/results)"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # the peers use names that newer Python and torch have deprecated
    torch.set_num_threads(1)
    model = load(MODEL, options.models).requires_grad_(False)
    part = hf.load_data(SPECS[MODEL].data, root=options.data).test[: options.inputs]
    threat = hf.Linf(options.levels / 255)
    rows = measure(model, part, threat, options.sigma, options.few, options.slow)
    setting = {"model": MODEL, "eps": threat.eps, "levels": options.levels, "sigma": options.sigma, "inputs": len(part)}
    record = {"run": describe_run(PACKAGES), "setting": setting, "masks": rows}
    write_results(NAME, record, to_markdown(record), options.out)


if __name__ == "__main__":
    main()

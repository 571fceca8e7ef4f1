"""The answer to "nothing is proved": what it means, how far the proofs reach, and what would change it at what cost."""

from dataclasses import dataclass

from holdfast.audits.bracket import Bracket
from holdfast.audits.report.commands import command, data_words, fine_tune, model_name, model_words, source_of
from holdfast.audits.report.next_step import Step
from holdfast.audits.result import Audit
from holdfast.audits.words import about, parts_of, share, sized
from holdfast.training import load_recipe

_TRAINED_FOR = {"linf": "ibp", "patch": "patch", "sparse": "sparse"}
"""Objective that trains for the proof of each kind of threat."""
NOISE = 0.25  # for smoothing, where the threat does not say how large a change is asked for
IMAGES = 1000  # that costs of training are given for
PASSES = {"own-proof": 15, "own-noise": 4}  # forward passes that one training step costs, with its bounds and gradients
SAMPLES = 100_000  # noisy copies that the proof of one input by smoothing takes at most


@dataclass(frozen=True)
class Unproved:
    """What a reader of "0 %" must know first: `meaning` in a few sentences, `reach` of the proofs, and what to do."""

    threat: str
    meaning: str
    reach: str
    steps: tuple[Step, ...]


def unproved(audit: Audit, bracket: Bracket) -> Unproved | None:
    """The answer for one threat; None where something is proved, where nothing held, or where no proof was tried."""
    if not bracket.nothing_proved:
        return None
    left = share(bracket.levels[-1].attacked_accuracy)
    meaning = (
        f"Nothing is proved at {bracket.threat}: the proofs do not reach this model at this budget. That is common for "
        "a network that was not trained for proofs, and it does not show that the model fails. Read the upper end: "
        f"the attacks leave {left}, so no more than that holds; how much of it holds is not known."
    )
    return Unproved(bracket.threat, meaning, _reach(bracket), unproved_steps(audit, bracket))


def unproved_steps(audit: Audit, bracket: Bracket) -> tuple[Step, ...]:
    """What would change it: a smaller budget, training for the proof, smoothing."""
    steps = [_smaller(audit, bracket)]
    if not model_words(audit)[0].endswith(".onnx"):  # a graph of ONNX has no class to put trained weights into
        steps += [for_the_proof(audit, bracket), smoothing(audit, bracket)]
    return tuple(step for step in steps if step is not None)


def _reach(bracket: Bracket) -> str:
    """The largest budget at which half of the inputs are proved, in a sentence."""
    kind, *_ = parts_of(bracket.threat)
    which = f"half of the {bracket.noun} that are classified right"
    if bracket.half is None:
        return (
            f"At which budget {which} would be proved was not found: it is below {bracket.threats[0]}, the smallest "
            "one that was audited."
        )
    measured = "" if bracket.half != bracket.reach else f", measured on a few {bracket.noun}"
    return f"The largest budget at which {which} are proved is {kind}:{sized(bracket.half, bracket.threat)}{measured}."


def _smaller(audit: Audit, bracket: Bracket) -> Step | None:
    """The same audit where the proofs reach: up to twice the budget at which half of the inputs are proved."""
    kind, _, valid, noise = parts_of(bracket.threat)
    if kind not in ("linf", "l2", "l1") or noise:
        return None
    size = sized(2 * bracket.half if bracket.half else bracket.budgets[0] / 4, bracket.threat)
    threat = f"{kind}:{size}" + (f"@{valid}" if valid else "")
    text = f"Ask for less: at budgets up to {size} proofs and attacks come closer to each other."
    seconds = sum(bracket.seconds.values())
    cost = f"{about(seconds)}, as this audit took at {bracket.threat}" if seconds else ""
    return Step(text, command("audit", audit, [threat], *_plan(audit)), cost)


def _plan(audit: Audit) -> tuple[str, ...]:
    return ("--n", str(audit.inputs), "--budget", str(audit.settings.get("plan", "standard")))


def for_the_proof(audit: Audit, bracket: Bracket) -> Step | None:
    """Fine-tune the model itself, then audit it again."""
    kind, _, _, noise = parts_of(bracket.threat)
    if kind not in _TRAINED_FOR or noise:
        return None
    folder = f"runs/{model_name(audit)}-proof"
    objective = () if kind == "linf" else (f"objective.name={_TRAINED_FOR[kind]}",)
    train = fine_tune(audit, "own-proof", folder, f"threat={bracket.threat}", *objective)
    text = (
        "Fine-tune this model for the proof: interval bounds enter the loss while the budget grows. It costs some "
        "clean accuracy."
    )
    again = command("audit", audit, [bracket.threat], *_plan(audit), model=f"{folder}/model.safetensors")
    return Step(_kept_apart(text, audit), f"{train}\n{again}", _training_cost(audit, "own-proof"))


def smoothing(audit: Audit, bracket: Bracket) -> Step | None:
    """Train with noise, then audit the smoothed model, which l2 radii are proved of."""
    kind, size, valid, _ = parts_of(bracket.threat)
    if kind not in ("linf", "l2", "l1"):
        return None
    own = kind == "l2"
    threat = f"l2:{size if own else 2 * NOISE}" + (f"@{valid}" if valid else "")
    sigma = f"{bracket.budgets[-1] / 2 if own else NOISE:.2g}"
    folder = f"runs/{model_name(audit)}-noise"
    train = fine_tune(audit, "own-noise", folder, f"threat={threat}", f"objective.sigma={sigma}")
    trained = f"{folder}/model.safetensors"
    again = command("audit", audit, [threat], "--sigma", sigma, *_plan(audit), model=trained)
    text = "Smooth it: what a model says to most noisy copies of an input is proved to hold in l2, for any network."
    text += "" if own else f" That is another threat: it proves nothing about {kind}."
    cost = _training_cost(audit, "own-noise")
    passes = _forward(audit) * audit.inputs * SAMPLES
    cost += f"; the audit up to {about(passes)}" if cost else ""
    return Step(_kept_apart(text, audit), f"{train}\n{again}", cost)


def _kept_apart(text: str, audit: Audit) -> str:
    """A folder without splits is audited whole; a model that was trained on it must be judged by other images."""
    words = data_words(audit)
    if not words or audit.data.endswith((" (test)", " (train)")):
        return text
    return f"{text} Put the images to train on into the folder train and those to audit into test first."


def _training_cost(audit: Audit, recipe: str) -> str:
    """Estimated from the time of the unchanged inputs in this audit."""
    epochs = load_recipe(recipe).epochs
    seconds = _forward(audit) * IMAGES * epochs * PASSES[recipe]
    return f"{about(seconds)} for every {IMAGES:,} training images ({epochs} epochs)" if seconds else ""


def _forward(audit: Audit) -> float:
    """Seconds that one pass of one input took; 0 where that is not known."""
    copies = 100 if source_of(audit, "audit") else 1  # of a smoothed model, whose passes are many
    return audit.brackets[0].seconds.get("clean", 0.0) / audit.inputs / copies

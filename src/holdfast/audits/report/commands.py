"""Shell lines that a reader can paste, whatever the data or the threat is called."""

import shlex
from collections.abc import Sequence
from pathlib import PurePath

from holdfast.audits.result import Audit
from holdfast.errors import InputError
from holdfast.threats import threat as read_threat

TRAINED = "model.safetensors"
"""File of the model in the folder of a training run."""


def command(verb: str, audit: Audit, threats: Sequence[str], *options: str, model: str | None = None) -> str:
    """A command for the audited model and data; each part is one word for the shell.

    Args:
        verb: such as "audit".
        audit: opened as its setting "source" says; where it does not, the word MODEL stands for the file of the model.
        threats: of the audit; one that cannot be written as text, such as a box of radii, is left out.
        options: further words.
        model: another file of a model of the same architecture.
    """
    words = ["holdfast", verb, *model_words(audit, model), *data_words(audit)]
    if verb == "audit" and model is None:
        words += source_of(audit, "audit")
    for text in threats:
        if readable(text):
            words += ["--threat", text]
    return shlex.join([*words, *options])


def fine_tune(audit: Audit, recipe: str, folder: str, *settings: str) -> str:
    """A command that trains the audited model on, by a recipe for models of the user's own."""
    file, *opening = model_words(audit)
    changes = [word for text in settings for word in ("--set", text)]
    words = ["holdfast", "train", recipe, "--model", file, *opening, *data_words(audit), *changes, "--out", folder]
    return shlex.join(words)


def model_words(audit: Audit, model: str | None = None) -> list[str]:
    """File of the model, or another file that is opened in the same way, and the options that open it."""
    file, *opening = source_of(audit, "model") or ["MODEL"]
    if model is None:
        return [file, *opening]
    # --key is for the checkpoint that the model came from; a trained model is saved without one.
    at = opening.index("--key") if "--key" in opening else len(opening)
    return [model, *opening[:at], *opening[at + 2 :]]


def data_words(audit: Audit) -> list[str]:
    """Options that open the data; none for tensors, which have no name."""
    return source_of(audit, "data") or ([] if audit.data == "tensors" else ["--data", data_name(audit)])


def source_of(audit: Audit, part: str) -> list[str]:
    """Words that open a part; none where nobody said them, or where a file that was edited has something else."""
    source = audit.settings.get("source")
    words = source.get(part, []) if isinstance(source, dict) else []
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def model_name(audit: Audit) -> str:
    """What folders of the model are called: its file, or the folder of a file that training wrote."""
    path = PurePath((source_of(audit, "model") or [audit.name])[0])
    return (path.parent.name if path.name == TRAINED else path.stem) or "model"


def data_name(audit: Audit) -> str:
    """Name of the data without the split."""
    return audit.data.rpartition(" (")[0] or audit.data


def readable(text: str) -> bool:
    """Whether the command line can be given the threat."""
    try:
        read_threat(text)
    except InputError:
        return False
    return True

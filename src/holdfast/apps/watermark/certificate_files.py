"""Files of a certification: noisy copies as they are counted, and the certificate."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.apps.watermark.certificate import WatermarkCertificate, noisy_accuracies
from holdfast.apps.watermark.triggers import TriggerSet
from holdfast.errors import InputError, StorageError
from holdfast.training.folder import write_text
from holdfast.utils.limits import parse_json, read_text


def count_copies(
    path: Path, key: str, model: nn.Module, triggers: TriggerSet, *, sigma: float, n: int, seed: int, resume: bool
) -> Tensor:
    """`noisy_accuracies` (n,), written down copy by copy: a run that was stopped goes on where it was.

    Args:
        path: text file, a first line that says what is counted and then one number for each copy.
        key: identifies model and triggers.
        resume: go on with the file, if it is there.
    """
    head = json.dumps({"key": key, "sigma": sigma, "seed": seed})
    done = _read(path, head)[:n] if resume and path.exists() else []
    write_text(path, "\n".join([head, *map(str, done), ""]))
    if len(done) == n:
        return torch.tensor(done)
    with path.open("a", encoding="utf-8", buffering=1) as file:

        def note(_: int, right: int) -> None:
            file.write(f"{right}\n")

        rest = noisy_accuracies(model, triggers, sigma=sigma, n=n, seed=seed, start=len(done), watch=note, show=True)
    return torch.cat([torch.tensor(done, dtype=torch.int64), rest])


def _read(path: Path, head: str) -> list[int]:
    """The numbers so far; a last line without its end was being written and is left out."""
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
        done = [int(line) for line in lines]
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read '{path}': {error}; start without --resume") from error
    if first != head:
        raise InputError(f"'{path}' belongs to another model, trigger set, sigma or seed; start without --resume")
    return done


def read_certificate(path: Path) -> WatermarkCertificate:
    """The certificate in a JSON file."""
    try:
        values = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read the certificate '{path}': {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"'{path}' holds no certificate of a watermark")
    return WatermarkCertificate.from_json(values)

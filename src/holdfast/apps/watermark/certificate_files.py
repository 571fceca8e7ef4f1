"""Files of a certification: noisy copies as they are counted, and the certificate."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.apps.watermark.certificate import WatermarkCertificate, noisy_accuracies
from holdfast.apps.watermark.triggers import TriggerSet
from holdfast.errors import InputError, StorageError
from holdfast.utils.files import write_text
from holdfast.utils.limits import parse_json, read_text
from holdfast.utils.resume import check_same, reading


def count_copies(
    path: Path, key: str, model: nn.Module, triggers: TriggerSet, *, sigma: float, n: int, seed: int, resume: bool
) -> Tensor:
    """`noisy_accuracies` (n,), written down copy by copy: a run that was stopped goes on where it was.

    Args:
        path: text file, a first line that says what is counted and then one number for each copy.
        key: identifies model and triggers.
        resume: go on with the file, if it is there.
    """
    settings = {"key": key, "sigma": sigma, "seed": seed}
    done = _read(path, settings)[:n] if resume and path.exists() else []
    write_text(path, "\n".join([json.dumps(settings), *map(str, done), ""]))
    if len(done) == n:
        return torch.tensor(done)
    with path.open("a", encoding="utf-8", buffering=1) as file:

        def note(_: int, right: int) -> None:
            file.write(f"{right}\n")

        rest = noisy_accuracies(model, triggers, sigma=sigma, n=n, seed=seed, start=len(done), watch=note, show=True)
    return torch.cat([torch.tensor(done, dtype=torch.int64), rest])


def _read(path: Path, settings: dict[str, Any]) -> list[int]:
    """The numbers so far; a last line without its end was being written and is left out."""
    with reading(path, "start without --resume"):
        first, *lines = read_text(path).split("\n")[:-1] or [""]
        check_same(dict(parse_json(first)), settings, f"'{path}'")
        return [int(line) for line in lines]


def read_certificate(path: Path) -> WatermarkCertificate:
    """The certificate in a JSON file."""
    try:
        with reading(path, "certify the watermark again"):
            values = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise StorageError(f"there is no certificate '{path}'") from error
    if not isinstance(values, dict):
        raise InputError(f"'{path}' holds no certificate of a watermark")
    return WatermarkCertificate.from_json(values)

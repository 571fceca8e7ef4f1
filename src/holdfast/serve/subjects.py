"""The models that can be tried: the one given on the command line, and the models of the training runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor, nn

from holdfast.data import Dataset, list_data, load_data
from holdfast.errors import InputError
from holdfast.models import load_model
from holdfast.serve.listing import ABOUT, MODEL, find_folders, find_run, plain, read_json
from holdfast.utils.png import data_uri, is_picture

_LOADING = Lock()


@dataclass(frozen=True, eq=False)
class Subject:
    """A model to try, and the data it is for: their test split has inputs to pick from, in the shape it takes."""

    name: str
    model: nn.Module
    data: Dataset

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.data.test.x.shape[1:])

    def input(self, position: int) -> tuple[Tensor, int]:
        """A test input, in the shape of `shape`, and its label."""
        if not 0 <= position < len(self.data.test):
            count = len(self.data.test)
            raise InputError(f"input {position}: '{self.data.name}' has the test inputs 0 to {count - 1}")
        return self.data.test.x[position], int(self.data.test.y[position])

    def class_name(self, number: int) -> str:
        """What the data call a class."""
        return self.data.classes[number] if number < len(self.data.classes) else f"class {number}"

    def to_dict(self, *, start: int, count: int) -> dict[str, Any]:
        """What the page needs to know, with pictures of `count` test inputs, as values for JSON."""
        part = self.data.test[start : start + count]
        shown = is_picture(self.shape)
        inputs = [
            {"position": start + i, "label": self.class_name(int(y)), "picture": data_uri(x.numpy()) if shown else None}
            for i, (x, y) in enumerate(zip(part.x, part.y, strict=True))
        ]
        about: Mapping[str, Any] = {"name": self.name, "data": self.data.name, "classes": list(self.data.classes)}
        return {**about, "shape": list(self.shape), "picture": shown, "total": len(self.data.test), "inputs": inputs}


def list_models(root: Path, given: Subject | None) -> list[dict[str, str]]:
    """Name and data of each model that can be tried, the one given first."""
    first = [] if given is None else [{"name": given.name, "data": given.data.name}]
    names = {row["name"] for row in first}
    found = ((name, _data_of(folder)) for name, folder in find_folders(root) if plain(folder / MODEL))
    return first + [{"name": name, "data": data} for name, data in found if data is not None and name not in names]


def open_subject(root: Path, name: str, given: Subject | None) -> Subject | None:
    """The model of this name with its data; None if there is none. The last ones used stay in memory."""
    if given is not None and name == given.name:
        return given
    folder = find_run(root, name)
    data = None if folder is None or not plain(folder / MODEL) else _data_of(folder)
    if folder is None or data is None:
        return None
    with _LOADING:
        return _open(name, folder / MODEL, (folder / MODEL).lstat().st_mtime_ns, data)


@lru_cache(maxsize=2)
def _open(name: str, path: Path, changed: int, data: str) -> Subject:
    """`changed`: when the file was written, so that a newer one is read again."""
    return Subject(name, load_model(path), _load(data))


@lru_cache(maxsize=2)
def _load(data: str) -> Dataset:
    return load_data(data)


def _data_of(folder: Path) -> str | None:
    """Data of a training run if they are known by name: a path in a file is no reason to read what lies there."""
    name = (read_json(folder / ABOUT) or {}).get("data")
    return next((info.name for info in list_data() if info.name == name), None)

"""Model files that ask for more than they hold: refused with an error of ours, soon, whatever the architecture."""

import itertools
import json
import struct
from functools import cache
from pathlib import Path
from threading import Thread

import pytest
import torch
from safetensors.torch import save_file

from clock import within
from holdfast.errors import HoldfastError, InputError, StorageError
from holdfast.models import list_models, load_model, make_model, read_metadata, save_model, size
from holdfast.models.catalog import _ENTRIES
from holdfast.models.size import at_most

SOON = 5.0  # seconds; refusals take milliseconds
FAMILIES = (
    *("mlp", "cnn", "lenet", "vgg16", "cnn-aol", "2c2f-minmax", "liresnet", "resnet18", "preact-resnet18", "wrn"),
    *("resnet-wong", "vit-s", "ensemble", "centroid", "masked", "cnn-cpl", "resnet-minmax"),
)
HOSTILE = [
    *(
        0,
        -1,
        10**6,
        10**9,
        2**62,
        10**30,
        0.5,
        -0.5,
        1e308,
        True,
        None,
        "",
        "x" * 1000,
        [],
        [[]],
        {},
        {"a": 1},
        [0],
        [-1],
    ),
    *([10**9] * 4, [1] * 20_000, ["max"] * 20_000, [[1, 1, 1, 10**9]] * 3, [[10**9, 3, 1, 1]], [[1, 3, 1, 1]] * 20_000),
    *([10**9, 10**9, 10**9], [1, 10**9, 10**9], [[1, 2], [3]], [["a"]], [[10**30]]),
]


def rewrite(source: Path, target: Path, record: object) -> Path:
    """The model file with another record in its header; a text is taken as it is."""
    content = source.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["holdfast"] = record if isinstance(record, str) else json.dumps(record)
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return target


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_model(make_model("mlp", input_shape=(4,), classes=2, hidden=(3,), seed=0), tmp_path / "m.safetensors")


@cache
def small(name: str) -> torch.nn.Module:
    """The architecture as small as it goes, so that its file is small."""
    few: dict[str, object] = {
        "vit-s": {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8},
        **{key: {"width": 2, "depth": 1, "neck": 2} for key in ("liresnet", "resnet-minmax")},
        "wrn": {"depth": 10, "width": 1},
        "resnet18": {"channels": (2, 2, 2, 2)},
        "preact-resnet18": {"channels": (2, 2, 2, 2), "stem_channels": 2},
        "vgg16": {"width": 1},
        "resnet-wong": {"input_shape": (1, 4, 4)},
    }
    return make_model(name, seed=0, **few.get(name, {}))


@pytest.mark.parametrize("layers", [20_000, 400_000])
def test_a_small_file_that_names_many_layers_is_refused_at_once(tmp_path: Path, file: Path, layers: int) -> None:
    options = {"input_shape": [4], "classes": 2, "hidden": [1] * layers}
    path = rewrite(file, tmp_path / "t.safetensors", {"architecture": ["mlp", options]})
    with (
        within(SOON),
        pytest.raises(HoldfastError, match=r"tensors; the file holds 4|record has|more than 100,000") as caught,
    ):
        load_model(path)
    assert len(str(caught.value)) < 1000


def test_an_architecture_with_more_values_than_the_file_is_refused_before_it_is_built(tmp_path, file):
    options = {"input_shape": [4], "classes": 2, "hidden": [10**6]}
    path = rewrite(file, tmp_path / "t.safetensors", {"architecture": ["mlp", options]})
    with within(SOON), pytest.raises(InputError, match=r"needs at least 4,000,000 values; the file holds 23"):
        load_model(path)


@pytest.mark.parametrize("name", FAMILIES)
def test_hostile_options_end_in_a_model_that_runs_or_in_an_error_of_ours(tmp_path: Path, name: str) -> None:
    """One builder of each family; the others are the same builders with other defaults."""
    path = save_model(small(name), tmp_path / "m.safetensors")
    recipe, options = small(name).architecture
    x = torch.rand(2, *options["input_shape"])
    messages = []
    for key, value in itertools.product(options, HOSTILE):
        changed = rewrite(path, tmp_path / "t.safetensors", {"architecture": [recipe, {**options, key: value}]})
        with within(SOON):
            try:
                model = load_model(changed)
            except (InputError, StorageError) as error:
                messages.append(str(error))
            else:
                assert model(x).shape[0] == 2, (key, value)
    assert len(messages) > 0.7 * len(options) * len(HOSTILE)
    assert max(map(len, messages)) < 2000


def test_every_architecture_of_the_catalogue_is_one_of_these_families() -> None:
    builders = {_ENTRIES[name].build for name in FAMILIES}
    others = [info.name for info in list_models() if _ENTRIES[info.name].build not in builders]
    assert others == ["adv-bnn", "cnn-sll", "convnet-minmax", "lenet-padded", "rse"]  # a few lines around others


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("wrn", {"depth": 6 * 10**9 + 4}),
        ("vit-s", {"depth": 10**9}),
        ("liresnet", {"depth": 10**9}),
        ("resnet18", {"blocks": [10**9] * 4}),
        ("resnet-wong", {"blocks": 10**9}),
        ("ensemble", {"members": 10**9}),
        ("ensemble", {"members": 10**9, "of": "ensemble"}),
        ("centroid", {"per_class": 10**9}),
        ("centroid", {"body": "centroid"}),
        ("mlp", {"normalize": [[0.5] * 90_000, 1]}),
        ("mlp", {"normalize": [0.5, 1e400]}),
        ("mlp", {"seed": 10**30}),
        ("mlp", {"name": "mlp"}),
        ("x" * 100_000, {}),
        ([[]], {}),
    ],
)
def test_depths_and_sizes_without_end(tmp_path: Path, file: Path, architecture: object, options: dict) -> None:
    path = rewrite(file, tmp_path / "t.safetensors", {"architecture": [architecture, options]})
    with within(SOON), pytest.raises((InputError, StorageError)) as caught:
        load_model(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("times", [40, 2_000, 100_000])
def test_nested_metadata_is_a_storage_error(tmp_path: Path, file: Path, times: int) -> None:
    text = '{"architecture": null, "metadata": {"a": ' + "[" * times + "]" * times + "}}"
    path = rewrite(file, tmp_path / "t.safetensors", text)
    for read in (load_model, read_metadata):
        with within(SOON), pytest.raises(StorageError, match="nested deeper than 32 levels"):
            read(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ('{"metadata": {}, "metadata": {"a": 1}}', "the key 'metadata' twice"),
        ('{"metadata": [1]}', "the metadata in it are not"),
        ('{"metadata": "text"}', "the metadata in it are not"),
        ("[" * 5, "Expecting"),
        ("9" * 5000, "digits"),
        ('{"a": "' + "x" * 2**20 + '"}', "its record has"),
    ],
)
def test_records_that_are_none(tmp_path: Path, file: Path, record: str, words: str) -> None:
    path = rewrite(file, tmp_path / "t.safetensors", record)
    with within(SOON), pytest.raises(StorageError, match=words):
        read_metadata(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_infinite_numbers_in_an_architecture_are_refused(tmp_path: Path, file: Path, number: str) -> None:
    text = f'{{"architecture": ["lenet", {{"width": {number}}}]}}'
    with within(SOON), pytest.raises(InputError, match="expected finite numbers"):
        load_model(rewrite(file, tmp_path / "t.safetensors", text))


def test_a_large_header_is_not_read(tmp_path: Path) -> None:
    text = b'{"a":' + b" " * (9 * 2**20) + b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with within(SOON), pytest.raises(StorageError, match="its header has 9,437"):
        load_model(tmp_path / "m.safetensors", torch.nn.Linear(1, 1))


def test_a_file_of_very_many_tensors_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "MOST", 200)
    count = 101
    state = {
        f"{2 * i + 1}.{key}": torch.zeros(shape)
        for i in range(count)
        for key, shape in (("weight", (1, 1)), ("bias", (1,)))
    }
    record = json.dumps({"architecture": ["mlp", {"input_shape": [1], "classes": 1, "hidden": [1] * (count - 1)}]})
    save_file(state, tmp_path / "m.safetensors", {"holdfast": record})
    with within(SOON), pytest.raises(InputError, match="more than 200 tensors; at most 200 are built"):
        load_model(tmp_path / "m.safetensors")


def test_whole_numbers_in_the_place_of_weights_are_refused(tmp_path: Path, file: Path) -> None:
    model = load_model(file)
    state = {name: tensor.to(torch.int32) for name, tensor in model.state_dict().items()}
    record = json.dumps({"architecture": model.architecture})
    save_file(state, tmp_path / "t.safetensors", {"holdfast": record})
    with pytest.raises(InputError, match=r"'1\.weight' is torch\.int32, the model needs torch\.float32"):
        load_model(tmp_path / "t.safetensors")


def test_checkpoints_whose_tensors_repeat_their_values_are_refused(tmp_path: Path) -> None:
    state = {"1.weight": torch.zeros(1, 1).expand(10**6, 10**6), "1.bias": torch.zeros(1).expand(10**6)}
    options = {"input_shape": [10**6], "classes": 10**6, "hidden": []}
    torch.save({"architecture": ("mlp", options), "state_dict": state}, tmp_path / "m.pt")
    with within(SOON), pytest.raises(InputError, match=r"tensors of 1,000,001,000,000 values"):
        load_model(tmp_path / "m.pt")


def test_checkpoints_whose_options_repeat_themselves_are_refused(tmp_path: Path) -> None:
    options: list = [1]
    for _ in range(30):
        options = [options, options]
    torch.save({"architecture": ("mlp", {"hidden": options}), "state_dict": {"w": torch.ones(1)}}, tmp_path / "m.pt")
    with within(SOON), pytest.raises(InputError, match=r"more than 100,000 values|nested deeper"):
        load_model(tmp_path / "m.pt")


def test_a_model_that_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    model = make_model("mlp", input_shape=(2,), hidden=(2,), seed=0)
    with pytest.raises(InputError, match="keep large metadata in a file of their own"):
        save_model(model, tmp_path / "m.safetensors", note="x" * 2**20)
    with pytest.raises(InputError, match="must be JSON values: it holds the number nan"):
        save_model(model, tmp_path / "m.safetensors", loss=float("nan"))
    assert not list(tmp_path.iterdir())


def test_the_limit_is_that_of_the_thread_that_builds() -> None:
    with at_most(1, 1):
        other = Thread(target=lambda: built.append(make_model("mlp", input_shape=(2,), seed=0)))
        built: list = []
        other.start()
        other.join()
        assert len(built) == 1
        with pytest.raises(InputError, match="it needs at least 512 values; the file holds 1"):
            make_model("mlp", input_shape=(2,))
    make_model("mlp", input_shape=(2,))

"""The data sets known by name: what comes with Holdfast, and what can be downloaded from where, under which terms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from holdfast.data.builtin import mnist_mini, two_moons
from holdfast.data.cifar import CIFAR10, CIFAR100, find_cifar10, find_cifar100, read_cifar
from holdfast.data.dataset import Dataset
from holdfast.data.idx import STEMS, find_idx, read_idx
from holdfast.data.npz import read_npz
from holdfast.data.scenes import digit_scenes
from holdfast.data.svhn import find_svhn, read_svhn


@dataclass(frozen=True)
class Builtin:
    """A data set that comes with Holdfast.

    Attributes:
        make: returns the data set.
        options: keyword arguments of `load_data` that `make` takes.
    """

    name: str
    summary: str
    license: str
    make: Callable[..., Dataset]
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemoteFile:
    """A file to download: its name, its MD5 sum in hexadecimal as published, its size in bytes."""

    name: str
    md5: str
    size: int


@dataclass(frozen=True)
class Source:
    """A data set on the network.

    Attributes:
        url: folder on the server that holds all `files`.
        classes: class names, or None where the files themselves name them.
        find: the path in a folder that `read` takes, or None if the folder does not hold the set.
        read: reader of the format, called as read(path, name=..., classes=...).
        aliases: further folders below the root to look into: where other tools keep the same files.
    """

    name: str
    summary: str
    license: str
    url: str
    files: tuple[RemoteFile, ...]
    classes: tuple[str, ...] | None
    find: Callable[[Path], Path | None]
    read: Callable[..., Dataset]
    aliases: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes to download in all."""
        return sum(file.size for file in self.files)


def _idx_files(*sums_and_sizes: tuple[str, int]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(f"{stem}.gz", md5, size) for stem, (md5, size) in zip(STEMS, sums_and_sizes, strict=True))


_EMBEDDED = (
    Builtin(
        name="mnist-mini",
        summary="MNIST excerpt, 10,000 + 2,000 images 1x28x28, 10 classes; embedded",
        license="CC BY-SA 3.0",
        make=mnist_mini,
    ),
    Builtin(
        name="two-moons",
        summary="points in the unit square, 2 classes; made on the fly",
        license="none needed",
        make=two_moons,
        options=("n", "noise", "seed"),
    ),
    Builtin(
        name="digit-scenes",
        summary="MNIST digits with boxes on cluttered backgrounds, images 1x48x48, 10 classes; made on the fly",
        license="CC BY-SA 3.0",
        make=digit_scenes,
        options=("n", "seed"),
    ),
)

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

_ALL = (
    Source(
        name="mnist",
        summary="handwritten digits, 60,000 + 10,000 images 1x28x28, 10 classes",
        license="CC BY-SA 3.0",
        url="https://ossci-datasets.s3.amazonaws.com/mnist",
        files=_idx_files(
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
        classes=_DIGITS,
        find=find_idx,
        read=read_idx,
        aliases=("MNIST/raw",),
    ),
    Source(
        name="fashion-mnist",
        summary="clothes, 60,000 + 10,000 images 1x28x28, 10 classes",
        license="MIT",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        files=_idx_files(
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        classes=_CLOTHES,
        find=find_idx,
        read=read_idx,
        aliases=("FashionMNIST/raw",),
    ),
    Source(
        name="cifar10",
        summary="photographs, 50,000 + 10,000 images 3x32x32, 10 classes",
        license="none stated; cite Krizhevsky 2009",
        url="https://www.cs.toronto.edu/~kriz",
        files=(RemoteFile(CIFAR10.archive, "c58f30108f718f92721af3b95e74349a", 170_498_071),),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        find=find_cifar10,
        read=read_cifar,
    ),
    Source(
        name="cifar100",
        summary="photographs, 50,000 + 10,000 images 3x32x32, 100 classes",
        license="none stated; cite Krizhevsky 2009",
        url="https://www.cs.toronto.edu/~kriz",
        files=(RemoteFile(CIFAR100.archive, "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),),
        classes=None,
        find=find_cifar100,
        read=read_cifar,
    ),
    Source(
        name="svhn",
        summary="house numbers, 73,257 + 26,032 images 3x32x32, 10 classes",
        license="non-commercial use only",
        url="http://ufldl.stanford.edu/housenumbers",
        files=(
            RemoteFile("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794),
            RemoteFile("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3", 64_275_384),
        ),
        classes=_DIGITS,
        find=find_svhn,
        read=read_svhn,
    ),
)

BUILTIN: dict[str, Builtin] = {each.name: each for each in _EMBEDDED}
SOURCES: dict[str, Source] = {source.name: source for source in _ALL}


def find_source(source: Source, root: Path) -> Callable[[], Dataset] | None:
    """How to read the set from below `root`, or None if it is not there.

    Looked at in turn: root/NAME, the source's aliases, root itself, and one file root/NAME.npz.
    """
    for folder in (root / source.name, *(root / alias for alias in source.aliases), root):
        path = source.find(folder)
        if path is not None:
            return partial(source.read, path, name=source.name, classes=source.classes)
    packed = root / f"{source.name}.npz"
    return partial(read_npz, packed, name=source.name, classes=source.classes) if packed.is_file() else None

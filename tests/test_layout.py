"""The folders are the architecture: a name leads to its file, and a path that is written down can be imported."""

import ast
import importlib
import pkgutil
import re
import types
from collections import defaultdict
from pathlib import Path

import holdfast as hf
from holdfast.registry import Part

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(SOURCE)], "holdfast."))


def hyphened(module: str) -> str:
    return module.rpartition(".")[2].replace("_", "-")


def is_part_of(family: str, name: str) -> bool:
    """Whether the parts of `family` stand side by side in `name`: fgsm in r-fgsm, smoothing in smoothing-l1."""
    return f"-{family}-" in f"-{name}-"


def has_its_file(method) -> bool:
    stem = hyphened(method.function.__module__)
    return is_part_of(stem, method.name) or (isinstance(method, Part) and stem == method.part.replace("_", "-"))


def test_every_registered_name_is_found_in_the_file_of_that_name():
    lost = [f"{m.kind} '{m.name}' is in {m.function.__module__}" for m in hf.methods() if not has_its_file(m)]
    assert not lost, f"{len(lost)} methods have no file where their name says:\n" + "\n".join(lost)


def test_no_two_modules_share_a_name_without_need():
    """A method may be an attack and an objective; a command may bear the name of what it calls."""
    places = defaultdict(list)
    for module in MODULES:
        path = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        stem = module.rpartition(".")[2]
        if path.is_file() and not stem.startswith("_") and not module.startswith("holdfast.cli."):
            places[stem].append(module)
    names = {method.name.replace("-", "_") for method in hf.methods()}
    shared = [" and ".join(found) for stem, found in places.items() if len(found) > 1 and stem not in names]
    assert not shared, "modules that share a name:\n" + "\n".join(shared)


def resolves(path: str) -> bool:
    """Whether a dotted path is a module, or a name in one, or a name in a class of one."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                fields = getattr(found, "__dataclass_fields__", {})
                return name in fields
            found = getattr(found, name)
        return True
    return False


def named_paths(text: str) -> set[str]:
    """Dotted paths in a text; what ends like a file is a file."""
    found = re.findall(r"(?<![\w./-])holdfast(?:\.[A-Za-z_]\w*)+(?![\w/-])", text)
    return {path for path in found if path.rpartition(".")[2] not in ("json", "toml", "py", "db", "log", "html")}


def constants(path: Path) -> str:
    """All docstrings, error messages and other texts of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return "\n".join(
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str
    )


def test_every_path_that_is_named_can_be_imported():
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    texts |= {path: constants(path) for path in sorted(SOURCE.rglob("*.py"))}
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in sorted(named_paths(text))
        if not resolves(name)
    ]
    assert not dead, "paths that cannot be imported:\n" + "\n".join(dead)


def test_no_module_is_hidden_by_a_name_of_its_package():
    """`import holdfast.a.b as m` gives a module."""
    hidden = []
    for name in MODULES:
        if name.rpartition(".")[2] == "__main__":
            continue
        importlib.import_module(name)
        package, _, stem = name.rpartition(".")
        found = getattr(importlib.import_module(package), stem)
        if not isinstance(found, types.ModuleType):
            hidden.append(f"{name} is hidden by a {type(found).__name__}")
    assert not hidden, "\n".join(hidden)


def test_the_rules_of_this_file_notice_what_they_are_for():
    assert is_part_of("fgsm", "r-fgsm")
    assert is_part_of("smoothing", "smoothing-l1")
    assert not is_part_of("fgs", "r-fgsm")
    assert not is_part_of("core", "crown")
    assert resolves("holdfast.training.Context.threat")
    assert resolves("holdfast.results.AttackResult.x_adv")
    assert not resolves("holdfast.train.initial.ibp_weights")
    assert named_paths("see `holdfast.models.Normalize`, src/holdfast.x and holdfast.toml.") == {
        "holdfast.models.Normalize"
    }

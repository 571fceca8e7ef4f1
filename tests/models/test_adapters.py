"""The adapter for models that people have: what they return, what they take, and the page about it."""

import inspect
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.errors import InputError, UnsupportedError
from holdfast.models import as_classifier, load_model
from lookalikes import X, bracket, export, optional


@dataclass
class Output:
    """What a model of Hugging Face returns: more than its logits."""

    logits: Tensor
    hidden: Any = None


class Wrapped(nn.Module):
    """Returns the logits of a dense layer in the way that `pack` packs them."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.dense, self.pack = nn.Linear(6, 3), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.dense(x))


FLAT = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda z: z, None),
        (lambda z: Output(z), None),
        (lambda z: {"loss": None, "logits": z}, None),
        (lambda z: {"scores": z}, "scores"),
        (lambda z: Output(None, hidden=z), "hidden"),
        (lambda z: (None, z), 1),
    ],
)
def test_the_logits_are_found_in_what_the_model_returns(pack: Any, output: Any) -> None:
    module = Wrapped(pack)
    model = as_classifier(module, output=output)
    assert not module.training
    torch.testing.assert_close(model(FLAT), module.dense(FLAT))
    bracket(model, FLAT)


@pytest.mark.parametrize(
    ("pack", "output", "words"),
    [
        (lambda z: {"scores": z}, None, "a mapping with the keys 'scores', in which there is no 'logits'"),
        (lambda z: (z, z), None, "a tuple of 2, in which there is no 'logits'"),
        (lambda z: (z, z), 2, "there is no 2"),
        (lambda z: Output(z), "scores", "an? Output, in which there is no 'scores'"),
        (lambda z: z, 0, "leave output=0 away"),
        (lambda z: Output(z), "hidden", "'hidden' of the model is a NoneType"),
    ],
)
def test_an_answer_that_is_not_there_is_named(pack: Any, output: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_classifier(Wrapped(pack), output=output)(FLAT)


@pytest.mark.parametrize("kind", ["probabilities", "probability"])
def test_a_last_softmax_or_sigmoid_is_taken_off(tmp_path: Path, kind: Any) -> None:
    outputs, last = (3, nn.Softmax(1)) if kind == "probabilities" else (1, nn.Sigmoid())
    dense = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, outputs)).eval()
    module = nn.Sequential(*dense, last).eval()
    loaded = load_model(export(module, tmp_path / "m.onnx", dynamo=False, x=FLAT))
    for given in (module, loaded):
        model = as_classifier(given, kind=kind)
        expected = dense(FLAT) if outputs == 3 else torch.cat([torch.zeros(5, 1), dense(FLAT)], 1)
        torch.testing.assert_close(model(FLAT), expected)
        bracket(model, FLAT)
        torch.testing.assert_close(given(FLAT), module(FLAT))  # the module itself stays as it was


class Probabilities(nn.Module):
    """Ends in a function, which cannot be taken off."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.dense, self.binary = nn.Linear(6, outputs), outputs == 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.dense(x)).squeeze(1) if self.binary else torch.softmax(self.dense(x), 1)


@pytest.mark.parametrize(("kind", "outputs"), [("probabilities", 3), ("probability", 1)])
def test_other_probabilities_become_logits_with_a_warning(kind: Any, outputs: int) -> None:
    module = Probabilities(outputs).double()
    with pytest.warns(UserWarning, match=f"the {kind} of the model are turned into logits by a logarithm"):
        model = as_classifier(module, kind=kind)
    x = FLAT.double()
    z = module.dense(x)
    z = torch.cat([torch.zeros_like(z), z], 1) if outputs == 1 else z
    torch.testing.assert_close(model(x), z - z.logsumexp(1, True) if outputs == 3 else z)
    assert bool(torch.isfinite(model(x * 1e4)).all())
    assert bool(hf.attack(model, x, model(x).argmax(1), hf.Linf(1.0), "pgd", steps=10).success.any())
    with pytest.raises(UnsupportedError, match="layer"):
        hf.bounds(model, x, hf.Linf(0.1), "ibp")


def test_scores_bytes_and_channels_last() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16 * 3, 1)).eval()
    model = as_classifier(module, mean=(120, 110, 100), std=(60, 50, 40), high=255, channels_last=True, kind="score")
    shift, scale = torch.tensor([120.0, 110, 100]), torch.tensor([60.0, 50, 40])
    score = module((255 * X.permute(0, 2, 3, 1) - shift) / scale)
    torch.testing.assert_close(model(X), torch.cat([torch.zeros_like(score), score], 1), rtol=1e-4, atol=1e-4)
    y = model(X).argmax(1)
    found = hf.attack(model, X, y, hf.Linf(0.5), "pgd", steps=10)
    assert bool((found.x_adv >= 0).all())
    assert bool(found.success.any())
    assert len(as_classifier(module)) == 1  # nothing before and nothing after what needs neither


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "logit"}, "one of logits, probabilities, score, probability"),
        ({"high": 0}, "high must be a number > 0"),
    ],
)
def test_bad_options_are_named(options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_classifier(nn.Linear(6, 3), **options)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got function"):
        as_classifier(lambda x: x)  # type: ignore[arg-type]


# --- The page ---------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|py)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, code = BLOCKS[number]
    if kind == "py":
        for name in re.findall(r"^(?:import|from) (torchvision|timm|sklearn|skl2onnx)", code, re.MULTILINE):
            optional(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, about themselves
        exec(compile(code, "docs/your-model.md", "exec"), {})


def test_the_page_names_every_option_of_the_adapter() -> None:
    for option in inspect.signature(as_classifier).parameters:
        assert option == "module" or re.search(rf"`{option}[=`]", PAGE)

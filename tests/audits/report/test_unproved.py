"""Nothing is proved: what the page says first, and that each command it prints runs on a user's own model and data."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from markupsafe import escape
from PIL import Image
from typer.testing import CliRunner

from audit_makers import make, make_bracket
from holdfast.audits.report.card import model_card
from holdfast.audits.report.page import render
from holdfast.audits.report.unproved import unproved
from holdfast.audits.saved import load_audit
from holdfast.cli import app, load

CLASS = """
from torch import nn

class Own(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Conv2d(1, width, 2)
        self.norm = nn.BatchNorm2d(width)
        self.last = nn.Linear(width * 6, 2)
        self.loose = nn.Linear(12, 2)

    def forward(self, x):
        wide = self.loose(x.flatten(1))  # adds nothing, but intervals do not know that
        return self.last(self.norm(self.first(x)).relu().flatten(1)) + (wide - wide)
"""


SHORT = [
    word for text in ("epochs=2", "budget.name=constant", "learning_rate.name=constant") for word in ("--set", text)
]


def without_proofs(bracket):
    records = tuple(r if r.certified is None else replace(r, certified=0.0, certified_by="") for r in bracket.records)
    return replace(bracket, records=records)


def answer(threat="linf:0.2", source=None, **changes):
    audit = make(brackets=(replace(without_proofs(make_bracket(threat)), **changes),))
    if source is not None:
        audit = replace(audit, settings={**audit.settings, "source": source})
    return unproved(audit, audit.brackets[0]), audit


def test_it_says_what_nothing_means_and_how_far_the_proofs_reach():
    found, audit = answer(reach=0.013)
    assert "the proofs do not reach this model at this budget" in found.meaning
    assert "Read the upper end: the attacks leave 60 %" in found.meaning
    assert found.reach == (
        "The largest budget at which half of the images that are classified right are proved is linf:0.013, measured "
        "on a few images."
    )
    assert "was not found: it is below linf:0.1" in answer()[0].reach
    page = render([audit])
    assert page.index("do not reach this model") < page.index("The numbers")
    assert "the proofs do not reach this model" in model_card(audit)
    assert "linf:0.013" in model_card(audit)
    assert unproved(make(), make_bracket()) is None
    assert unproved(make(), make_bracket(proved=False)) is None


def test_the_reach_comes_from_the_radii_where_they_tell():
    bracket = without_proofs(make_bracket("linf:51/255"))
    records = tuple(replace(r, certified=(i + 0.5) / 255) for i, r in enumerate(bracket.records))
    found = replace(bracket, records=records, reach=0.001)
    assert found.half == 5.5 / 255  # five of ten reach it
    assert "is linf:5.5/255." in unproved(make(brackets=(found,)), found).reach


def test_radii_of_inputs_that_are_classified_wrong_do_not_count():
    bracket = make_bracket()
    assert [r.certified for r in bracket.records] == [None, 0, 0, 0.05, 0, 0, 0.1, 0.2, 0.2, 0.2]
    assert bracket.half == 0.05


@pytest.mark.parametrize("threat", ["linf:2/255", "l2:0.5", "l1:3", "patch:2x2", "sparse:2", "box:[0.1, 0.2]"])
def test_every_command_opens_the_model_and_the_data_as_the_audit_did(threat):
    opening = ["--architecture", "my net.py:Own", "--arch-args", "width=3", "--key", "model", "--mean", "0.5"]
    source = {"model": ["w.pt", *opening], "data": ["--data", "photos/", "--root", "r"], "audit": []}
    found, _ = answer(threat, source)
    assert (
        len(found.steps) == {"linf": 3, "l2": 2, "l1": 2, "patch": 1, "sparse": 1, "box": 0}[threat.partition(":")[0]]
    )
    for line in "\n".join(step.command for step in found.steps).splitlines():
        words = shlex.split(line)
        assert words[words.index("--architecture") + 1] == "my net.py:Own"
        assert words[words.index("--data") + 1] == "photos/"
        assert words[words.index("--root") + 1] == "r"
        trained = words[2].startswith("runs/w-")
        assert ("--key" in words) is not trained  # what training saves has no entries
        assert words[words.index("--mean") + 1] == "0.5"
        load(words[1]).make_context(words[1], words[2:])  # an option that does not exist is an error


def test_costs_are_estimated_from_the_audit():
    smaller, proof, noise = answer(reach=0.02)[0].steps
    # 0.25 s for ten inputs; an audit at this threat took 63.25 s.
    assert smaller.cost == "about 65 s, as this audit took at linf:0.2"
    assert "--threat linf:0.04" in smaller.command
    assert proof.cost == f"about {0.025 * 1000 * 20 * 15 / 3600:.2g} h for every 1,000 training images (20 epochs)"
    assert noise.cost.endswith("the audit up to about 6.9 h")
    assert answer(seconds={})[0].steps[1].cost == ""


def test_a_model_that_cannot_be_trained_here_is_not_to_be_trained():
    found, _ = answer(source={"model": ["net.onnx"], "data": ["--data", "photos"]})
    assert [step.command.split()[1] for step in found.steps] == ["audit"]


def test_images_to_audit_are_kept_apart_from_images_to_train_on():
    _, audit = answer()
    assert "test first" not in unproved(audit, audit.brackets[0]).steps[1].text
    folder = replace(audit, data="photos")
    assert "into the folder train" in unproved(folder, folder.brackets[0]).steps[1].text


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A class, a checkpoint with prefixes, and a folder of pictures, of a user's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own net.py").write_text(CLASS)
    space: dict = {}
    exec(CLASS, space)
    torch.manual_seed(0)
    model = space["Own"](width=3)
    with torch.no_grad():
        model.last.weight.mul_(30)
        model.loose.weight.mul_(1000)
    draw = np.random.default_rng(0)
    for part, count in (("train", 24), ("test", 5)):
        pictures = torch.from_numpy(draw.random((4 * count, 1, 3, 4), dtype=np.float32))
        labels = model.eval()((pictures * 255).round() / 255 * 2 - 1).argmax(1)
        for label in (0, 1):
            folder = tmp_path / "photos" / part / "ab"[label]
            folder.mkdir(parents=True)
            for i, picture in enumerate(pictures[labels == label][:count]):
                Image.fromarray((picture[0] * 255).round().byte().numpy()).save(folder / f"{i}.png")
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": state, "ema": state}, tmp_path / "weights.pt")
    return [
        *("weights.pt", "--architecture", "own net.py:Own", "--arch-args", "width=3", "--key", "model"),
        *("--mean", "0.5", "--std", "0.5", "--data", "photos"),
    ]


def run(line):
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, f"{line}: {result.output}"
    return result.output


def test_every_command_runs_on_the_users_own_model_and_data(own, tmp_path):
    how = ["--threat", "linf:4/255", "--certify", "ibp", "--attack", "fgsm", "--budget", "quick", "--n", "4"]
    how += ["--budgets", "1", "--out", "run"]
    assert "nothing is proved" in " ".join(run(["audit", *own, *how]).split())
    audit = load_audit(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    steps = unproved(audit, audit.brackets[0]).steps
    assert [step.command.split()[1] for step in steps] == ["audit", "train", "train"]
    for line in "\n".join(step.command for step in steps).splitlines():
        assert str(escape(line)) in page
        _, *words = shlex.split(line)
        run([*words, *(SHORT if words[0] == "train" else ("--budgets", "1", "--attack", "fgsm"))])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if "weights" in path.name)[-2:] == [
        "weights-noise",
        "weights-proof",
    ]

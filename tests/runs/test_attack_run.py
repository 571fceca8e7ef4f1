"""An attack run: what it finds is what the attack finds, a kill loses nothing, and every file can be relied on."""

import csv
import json
from dataclasses import fields
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import holdfast as hf
from holdfast.runs.attack_files import Found
from holdfast.runs.attack_png import contains_rounded, eight_bit
from holdfast.runs.attack_run import attack_run
from holdfast.runs.attack_summary import summary_table

module = import_module("holdfast.runs.attack_run")
OPTIONS = {"steps": 4, "restarts": 2}
HOW = {"options": OPTIONS, "batch_size": 16, "progress": False}
THREAT = hf.Linf(0.06)


def task(shape=(1, 4, 5), count=50, classes=3, dtype=torch.float32):
    """A small network on random images; about an eighth of the labels are wrong."""
    generator = torch.Generator().manual_seed(5)
    size = int(np.prod(shape))
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, classes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    # 8-bit values, as those of images.
    x = torch.randint(0, 256, (count, *shape), generator=generator).float() / 255
    y = model(x).argmax(1)
    y[::8] = (y[::8] + 1) % classes
    return model.to(dtype), (x.to(dtype), y)


def run(out, goal=THREAT, method="pgd", **changes):
    model, data = task()
    return attack_run(model, data, goal, method, out=out, **{**HOW, **changes})


def assert_same(a: Found, b: Found):
    for field in fields(Found):
        if field.name != "seconds":
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


@pytest.fixture
def dies(monkeypatch):
    """Lets the attack of that name die on the call after the first `calls`; returns what each call was given."""

    def arm(calls, name="run_attack"):
        real, seen = getattr(module, name), []

        def stops(model, x, *args, **kwargs):
            if len(seen) == calls:
                raise KeyboardInterrupt
            seen.append(kwargs["index"].tolist())
            return real(model, x, *args, **kwargs)

        monkeypatch.setattr(module, name, stops)
        return seen

    return arm


def test_finds_what_the_attack_finds(tmp_path):
    model, (x, y) = task()
    got = run(tmp_path, seed=3).found
    want = hf.attack(model, x, y, THREAT, "pgd", seed=3, **OPTIONS)
    assert 5 < int((got.by == "pgd").sum()) < 43
    assert (got.by == "").any()
    np.testing.assert_array_equal(got.index, np.arange(50))
    np.testing.assert_array_equal(got.success, want.success.numpy())
    assert got.by.tolist() == list(want.by)
    np.testing.assert_allclose(got.x_adv, want.x_adv.numpy(), atol=1e-6)
    np.testing.assert_array_equal(got.gradients, want.gradients.numpy())
    np.testing.assert_array_equal(got.queries, want.queries.numpy())
    np.testing.assert_array_equal(got.prediction != y.numpy(), got.success)
    change = np.abs(got.x_adv - x.numpy()).reshape(50, -1).max(1)
    np.testing.assert_allclose(got.distance[got.success], change[got.success])
    assert np.isinf(got.distance[~got.success]).all()


def test_the_seed_decides(tmp_path):
    first, same, other = (run(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert_same(first.found, same.found)
    assert not np.array_equal(first.found.x_adv, other.found.x_adv)


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize(("goal", "method", "name"), [(THREAT, "pgd", "run_attack"), ("l2", "fmn", "run_nearest")])
def test_killed_run_goes_on_where_it_stopped(tmp_path, dies, monkeypatch, calls, goal, method, name):
    options = {"options": OPTIONS if name == "run_attack" else {"steps": 6}}
    whole = run(tmp_path / "whole", goal, method, **options)
    dies(calls, name)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", goal, method, **options)
    assert not (tmp_path / "killed" / "summary.json").exists()
    monkeypatch.undo()
    seen = dies(99, name)
    resumed = run(tmp_path / "killed", goal, method, resume=True, **options)
    assert [i for batch in seen for i in batch] == list(range(16 * calls, 50))
    assert_same(resumed.found, whole.found)
    ours, theirs = (dict(r.summary) for r in (resumed, whole))
    for key in ("seconds", "finished"):
        ours.pop(key), theirs.pop(key)
    assert ours == theirs
    assert (tmp_path / "killed" / "results.csv").read_text() == (tmp_path / "whole" / "results.csv").read_text()


def test_finished_run_resumes_without_work(tmp_path, dies):
    first = run(tmp_path)
    dies(0)
    assert_same(run(tmp_path, resume=True).found, first.found)


def test_files_hold_the_results(tmp_path):
    model, (x, y) = task()
    result = run(tmp_path)
    with np.load(tmp_path / "examples.npz", allow_pickle=False) as arrays:
        assert sorted(arrays.files) == ["by", "index", "success", "x", "x_adv", "y"]
        np.testing.assert_array_equal(arrays["x"], x.numpy())
        assert arrays["x_adv"].dtype == np.float32
        np.testing.assert_array_equal(arrays["x_adv"], result.found.x_adv)
        wrong = model(torch.from_numpy(arrays["x_adv"])).argmax(1).numpy() != arrays["y"]
        np.testing.assert_array_equal(wrong, arrays["success"])
        np.testing.assert_array_equal(arrays["y"], y.numpy())
        assert arrays["by"].tolist() == result.found.by.tolist()
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == list(range(50))
    assert [row["by"] for row in rows] == result.found.by.tolist()
    assert [int(row["queries"]) for row in rows] == result.found.queries.tolist()
    assert all((row["distance"] == "") == (row["success"] == "False") for row in rows)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.summary))
    held, clean = sum(row["success"] == "False" for row in rows), sum(row["by"] != "clean" for row in rows)
    assert (summary["attacked_accuracy"], summary["clean_accuracy"]) == (held / 50, clean / 50)
    assert summary["broken_by"] == {"pgd": clean - held, "clean": 50 - clean}
    assert summary["gradients"] == sum(int(row["gradients"]) for row in rows)
    assert summary["options"] == OPTIONS
    assert set(summary["hashes"]) == {"model", "data"}
    assert summary["versions"]["torch"] == torch.__version__


def test_nearest_example_of_a_linear_model_has_the_exact_distance(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2).double().eval(), torch.rand(30, 6, dtype=torch.float64) * 0.1 + 0.45
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 6) * 0.5)
        model.bias -= model(x).mean(0)  # the boundary runs through the middle of the points
        logits = model(x)
    y = logits.argmax(1)
    w = model.weight[0] - model.weight[1]
    exact = ((logits[:, 0] - logits[:, 1]).abs() / w.norm()).detach().numpy()
    result = attack_run(model, (x, y), "l2", out=tmp_path, progress=False)
    assert result.found.x_adv.dtype == np.float64
    np.testing.assert_allclose(result.found.distance, exact, rtol=0.02)
    assert (result.found.distance >= exact * (1 - 1e-9)).all()
    distance = result.summary["distance"]
    assert distance["smallest"] == result.found.distance.min()
    assert distance["median"] == np.sort(result.found.distance)[15]
    assert "attacked_accuracy" not in result.summary


def test_summary_where_nothing_is_found_or_nothing_is_right(tmp_path):
    model = nn.Linear(3, 2).eval()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    x = torch.rand(4, 3)
    none = attack_run(model, (x, torch.zeros(4, dtype=torch.long)), "l2", "fmn", out=tmp_path / "a", progress=False)
    assert none.summary["distance"] == {"smallest": None, "median": None, "largest": None}
    assert none.summary["held"] == 4
    wrong = attack_run(model, (x, torch.ones(4, dtype=torch.long)), "l2", "fmn", out=tmp_path / "b", progress=False)
    assert wrong.summary["distance"] == {}
    assert wrong.summary["broken_by"] == {"clean": 4}
    for result in (none, wrong):
        assert summary_table(result.summary).row_count >= 4
        json.loads((result.folder / "summary.json").read_text())


def test_a_folder_with_a_run_is_refused(tmp_path):
    run(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(hf.InputError, match="already holds a run"):
        run(tmp_path / "run")
    with pytest.raises(hf.InputError, match="seed: was 0, is 1"):
        run(tmp_path / "run", resume=True, seed=1)
    with pytest.raises(hf.InputError, match=r"threat: was 'linf:0\.06', is 'linf:0\.07'"):
        run(tmp_path / "run", hf.Linf(0.07), resume=True)
    with pytest.raises(hf.InputError, match="there is no run to resume"):
        run(tmp_path / "other", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert not (tmp_path / "other").exists()


def test_a_run_that_stored_nothing_does_not_block_its_folder(tmp_path):
    with pytest.raises(hf.UnsupportedError, match="'ddn' minimises l2, not 'linf'"):
        run(tmp_path, "linf", "ddn", options={})
    assert run(tmp_path, "l2", "ddn", options={"steps": 5}).summary["method"] == "ddn"


def test_damaged_files_are_named(tmp_path):
    run(tmp_path)
    part = tmp_path / "parts" / "00000016.npz"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(hf.StorageError, match=r"00000016\.npz.*delete it"):
        run(tmp_path, resume=True)
    part.unlink()
    assert_same(run(tmp_path, resume=True).found, run(tmp_path / "again").found)
    (tmp_path / "attack.json").write_text("[1]")
    with pytest.raises(hf.StorageError, match=r"cannot read .*attack\.json"):
        run(tmp_path, resume=True)


def test_a_folder_that_cannot_be_made_is_refused_before_work(tmp_path, dies):
    (tmp_path / "file").write_text("")
    dies(0)
    with pytest.raises(hf.InputError, match="is a file"):
        run(tmp_path / "file")
    with pytest.raises(hf.StorageError, match="cannot write"):
        run(tmp_path / "file" / "run")


def read(path):
    """A PNG as a data set reads it, shape (C, H, W)."""
    pixels = np.asarray(Image.open(path))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return torch.from_numpy(pixels.astype(np.float32)) / 255


@pytest.mark.parametrize(
    ("goal", "method", "shape", "options"),
    [
        (THREAT, "pgd", (1, 4, 5), OPTIONS),
        (hf.L2(0.25), "pgd", (3, 4, 5), OPTIONS),
        (hf.Sparse(2), "sparse-pgd", (1, 4, 5), {"steps": 20}),
        (hf.Patch(2, 2), "patch-pgd", (1, 4, 5), {"steps": 5}),
        ("linf", "fmn", (1, 4, 5), {"steps": 10}),
    ],
)
def test_pictures_fool_the_model_and_lie_in_the_threat(tmp_path, goal, method, shape, options):
    model, (x, y) = task(shape)
    result = attack_run(model, (x, y), goal, method, out=tmp_path, png=True, **{**HOW, "options": options})
    found, pictures = result.found, result.summary["png"]
    files = sorted((tmp_path / "png").iterdir())
    examples = np.flatnonzero(found.success & (found.by != "clean"))
    assert 0 < len(files) == pictures["written"] == len(examples) - pictures["right_again"]
    assert pictures["outside"] == 0
    written = {int(path.stem) for path in files}
    assert written <= set(examples.tolist())
    for i in examples.tolist():
        rounded = torch.from_numpy(eight_bit(found.x_adv[i], 0, 1)).float()
        assert (int(model(rounded[None]).argmax()) != int(y[i])) == (i in written)
    for path in files:
        i, shown = int(path.stem), read(path)
        assert int(model(shown[None]).argmax()) != int(y[i])
        assert float((shown - torch.from_numpy(found.x_adv[i])).abs().max()) <= 1 / 510 + 1e-7
        if isinstance(goal, hf.Threat):
            assert bool(contains_rounded(goal, shown[None], x[i : i + 1]))


def test_pictures_that_do_not_survive_are_counted(tmp_path):
    """The classes differ by less than half a level, so that no 8-bit image crosses the boundary."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[0.0] * 4, [1.0] * 4]))
        model[1].bias.copy_(torch.tensor([4 * (100 + 0.4) / 255, 0.0]))
    x, y = torch.full((6, 1, 2, 2), 100 / 255), torch.zeros(6, dtype=torch.long)
    result = attack_run(model, (x, y), hf.Linf(0.45 / 255), "fgsm", out=tmp_path, png=True, progress=False)
    assert result.summary["broken_by"] == {"fgsm": 6}
    assert result.summary["png"] == {"written": 0, "right_again": 6, "outside": 0}
    assert not (tmp_path / "png").exists()


@given(levels=st.lists(st.floats(0, 1, width=32), min_size=12, max_size=12), eps=st.floats(0.01, 0.3))
@settings(max_examples=50, deadline=None)
def test_rounding_to_8_bits_never_leaves_the_threat(levels, eps):
    x_adv = torch.tensor(levels).view(1, 1, 3, 4)
    base = torch.full_like(x_adv, 0.5)
    for threat in (hf.Linf(eps), hf.L2(eps), hf.L1(eps), hf.Sparse(3), hf.Patch(2, 2)):
        inside = threat.project(x_adv, base)
        shown = torch.from_numpy(eight_bit(inside.numpy(), 0, 1)).float()
        assert bool(contains_rounded(threat, shown, base))


def test_one_level_beyond_the_rounding_is_outside():
    x = torch.full((1, 1, 3, 4), 100 / 255)
    far = x.clone()
    far[..., 0, :2] = 104 / 255
    assert not bool(contains_rounded(hf.Linf(3 / 255), far, x))
    assert bool(contains_rounded(hf.Linf(3.5 / 255), far, x))
    assert not bool(contains_rounded(hf.Sparse(1), far, x))
    assert bool(contains_rounded(hf.Sparse(2), far, x))
    assert not bool(contains_rounded(hf.Patch(2, 1), far, x))
    # Half a level on all other pixels is rounding; it counts as no change.
    assert bool(contains_rounded(hf.Sparse(2), torch.where(far == x, far + 0.9 / 510, far), x))


def test_all_256_levels_read_back_as_written():
    levels = np.arange(256).reshape(1, 16, 16)
    np.testing.assert_array_equal(eight_bit(levels / 255, 0, 1).astype(np.float32), levels.astype(np.float32) / 255)
    np.testing.assert_allclose(eight_bit(np.array([-1.0, 0.001, 1.0]), -1, 1), [-1, 1 / 255, 1])


def test_bfloat16_is_kept_exactly(tmp_path):
    model, (x, y) = task(dtype=torch.bfloat16)
    found = attack_run(model, (x, y), hf.Linf(0.1), "fgsm", out=tmp_path, progress=False).found
    assert found.x_adv.dtype == np.float32
    back = torch.from_numpy(found.x_adv)
    assert torch.equal(back.bfloat16().float(), back)


def test_bad_arguments_are_refused_before_a_folder_is_made(tmp_path):
    out = tmp_path / "run"
    for changes, message in [
        ({"method": "pdg"}, "Did you mean 'pgd'"),
        ({"method": "patch-pgd", "options": {}}, "does not handle the threat"),
        ({"goal": "l3", "method": None}, "unknown norm 'l3'"),
        ({"goal": "l2", "method": "pgd"}, "unknown method 'pgd' for the nearest example"),
        ({"n": 0}, "n must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ]:
        with pytest.raises(hf.HoldfastError, match=message):
            run(out, **changes)
    model = nn.Linear(2, 2).eval()
    with pytest.raises(hf.InputError, match="png needs images"):
        attack_run(model, (torch.rand(3, 2), torch.zeros(3, dtype=torch.long)), hf.Linf(0.1), out=out, png=True)
    assert not out.exists()

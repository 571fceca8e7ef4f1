"""Pre-trained weights of timm, brought to small images, through both stages of fine-tuning."""

import pytest
import torch

from holdfast import InputError
from holdfast.data import Dataset, Split
from holdfast.models import load_model, load_vit, make_model, save_model
from holdfast.training import load_recipe, train
from timm_files import DEPTH, HEADS, MLP, D, timm_weights

STAGE_TWO = ("trh", "awp", "s2o", "swa")
SHORT = {"epochs": 3, "batch_size": 16, "warmup": 0.5, "validation": 0.2, "attack.steps": 2, "evaluate.attack_steps": 2}


@pytest.fixture
def data():
    torch.manual_seed(0)
    x, y = torch.rand(60, 3, 16, 16) * 0.5, torch.arange(60) % 2
    x[y == 1] += 0.4
    split = Split(x, y)
    return Dataset("toy", split, split, ("dark", "bright"))


@pytest.fixture
def weights(tmp_path):
    """From 64 x 64 pixels with patches of 16 to 16 x 16 pixels with overlapping patches of 4."""
    torch.save(timm_weights(patch=16, grid=(4, 4)), tmp_path / "timm.pth")
    sizes = {"dim": D, "heads": HEADS, "depth": DEPTH, "mlp_dim": MLP, "normalize": [0.47, 0.25]}
    model = make_model("vit-s", input_shape=(3, 16, 16), classes=2, patch=4, stride=2, seed=0, **sizes)
    save_model(load_vit(tmp_path / "timm.pth", model, new_head=True), tmp_path / "start.safetensors")
    return tmp_path / "start.safetensors"


@pytest.mark.parametrize("name", STAGE_TWO)
def test_both_stages_train_from_the_weights(name, weights, data, tmp_path):
    short = {**SHORT, "optimizer.lr": 0.02, "progress": False}
    first = train("cifar10-vit-s16-trades", data=data, init=str(weights), out=tmp_path / "one", **short)
    assert first.history[-1]["train_loss"] < first.history[0]["train_loss"]
    start = str(tmp_path / "one" / "model.safetensors")
    second = train(f"cifar10-vit-s16-{name}", data=data, init=start, **short)
    assert second.history[0]["train_loss"] < first.history[0]["train_loss"]
    assert second.history[-1]["validation_robust"] >= first.history[0]["validation_robust"]


def test_training_starts_at_the_given_weights(weights, data):
    still = train("cifar10-vit-s16-trades", data=data, init=str(weights), **{**SHORT, "optimizer.lr": 1e-12}).model
    begun = load_model(weights).state_dict()
    assert all(torch.allclose(value, begun[key], atol=1e-6) for key, value in still.state_dict().items())
    with pytest.raises(InputError, match=r"init: there is no .*vit-s16-cifar10.safetensors"):
        train("cifar10-vit-s16-trades", data=data, **SHORT)


@pytest.mark.parametrize("name", STAGE_TWO)
def test_stage_two_keeps_the_shared_settings(name):
    one, two = load_recipe("cifar10-vit-s16-trades"), load_recipe(f"cifar10-vit-s16-{name}")
    shared = ("init", "threat", "epochs", "batch_size", "warmup", "model", "objective", "attack", "learning_rate")
    assert all(getattr(one, key) == getattr(two, key) for key in (*shared, "augment"))
    own = ("regularizers", "perturb_weights", "average")
    assert sum(getattr(one, key) != getattr(two, key) for key in own) == 1

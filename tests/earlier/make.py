"""Makes the files of this folder: `python make.py FOLDER`, where FOLDER holds nothing but own.toml.

Only the public functions and the command line are used. README.md says which file is which.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import holdfast as hf

# The command line in a process of its own, which gets a signal in the middle of so many passes through the model.
COMMAND = """
import os, signal, sys
from importlib.metadata import entry_points
import torch

torch.set_num_threads(1)
left, name, *words = sys.argv[1:]
left = int(left)

def count(module, inputs, output):
    global left
    left -= hasattr(module, "architecture")
    if left == 0:
        left = -1
        os.kill(os.getpid(), signal.Signals[name])

torch.nn.modules.module.register_module_forward_hook(count)
sys.argv = ["holdfast", *words]
(command,) = entry_points(group="console_scripts", name="holdfast")
command.load()()
"""
BRACKET = ("threat", "budgets", "headline", "levels")  # what is kept of an audit to compare with
MLP = ("models/mlp.safetensors", "--data", "data.npz")
AUDIT = ("audit", *MLP, "--threat", "linf:0.15", "--threat", "l2:0.3", "--budget", "quick", "--n", 10, "--budgets", 2)
ATTACK = ("attack", *MLP, "--threat", "linf:0.15", "--method", "pgd", "--option", "steps=4", "--n", 120)
CERTIFY = ("certify", *MLP, "--threat", "linf:0.05", "--method", "crown", "--inputs", 10)
SMOOTHING = (
    *("certify", *MLP, "--threat", "l2:0.3", "--method", "smoothing", "--sigma", 0.2, "--alpha", 0.01),
    *("--inputs", 6, "--n", 2000, "--option", "batch=100"),
)
COMPARE = ("compare", "training/plain", "training/own", "--inputs", 30, "--attack", "cascade")
MARK = (
    *("--data", "data.npz", "--architecture", "linear", "--scheme", "noise", "--label", 1, "--triggers", 20),
    *("--epochs", 10, "--batch-size", 10, "--trigger-batch", 10, "--lr", 0.3, "--noise", 0.2),
)
PROOF = (
    *("watermark", "certify", "watermark/model.safetensors", "watermark/triggers.npz", "--sigma", 3.0),
    *("--radius", 0.5, "--radius", 1.5, "--n", 200, "--confidence", 0.9),
)


def holdfast(*words, after=-1, signal="SIGKILL", code=0):
    """Runs the command line; with `after`, the process gets a signal after so many passes through the model."""
    call = [sys.executable, "-c", COMMAND, str(after), signal, *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)


def make_data():
    """Three classes of pictures 1 x 4 x 5, a bright part each: 80 to train, 120 to test."""
    rng = np.random.default_rng(0)
    y = np.arange(200) % 3
    bright = np.array([0, 1, 1, 2])[None] == y[:, None]
    x = (rng.random((200, 1, 4, 5)) * 150 + 105 * bright[:, None, :, None]).astype(np.uint8)
    classes = np.array(["top", "middle", "bottom"])
    np.savez_compressed(
        "data.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:], classes=classes, layout="NCHW"
    )


def make_models(x):
    """One model of each family in each kind of file; returns the logits of x."""
    os.mkdir("models")
    shape = {"input_shape": (1, 4, 5), "classes": 3}
    models = {
        "mlp": hf.load_model("training/own/model.safetensors"),
        "cnn": hf.make_model(
            "cnn", layers=[[3, 3, 1, 1], "max"], hidden=[6], batch_norm=True, normalize=(0.4, 0.3), seed=1, **shape
        ),
        "resnet": hf.make_model("resnet18", blocks=[1, 1], channels=[3, 4], seed=2, **shape),
        "liresnet": hf.make_model("2c2f-minmax", layers=[[4, 3, 1, 1]], hidden=[6], seed=3, **shape),
        "vit": hf.make_model("vit-ti", patch=1, dim=8, depth=1, heads=2, mlp_dim=8, seed=4, **shape),
    }
    for name, model in models.items():
        with torch.no_grad():
            model.train()(x)  # batch norms have seen something
        hf.save_model(model.eval(), f"models/{name}.safetensors", epoch=4)
    mlp = models["mlp"]
    torch.save(mlp.state_dict(), "models/weights.pt")
    torch.save({"architecture": mlp.architecture, "state_dict": mlp.state_dict()}, "models/whole.pt")
    torch.onnx.export(mlp, (x[:1],), "models/mlp.onnx", dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "n"}})
    with torch.no_grad():
        return {name: model(x).tolist() for name, model in models.items()}


def main():
    torch.set_num_threads(1)
    make_data()
    holdfast("train", "own.toml", "--out", "training/own")
    holdfast("train", "own.toml", "--out", "training/interrupted", after=150, signal="SIGTERM", code=130)
    plain = {"model": {"name": "mlp", "hidden": [12]}, "optimizer": {"lr": 0.5}, "objective": {"name": "standard"}}
    how = {"data": "data.npz", "threat": "linf:0.1", "epochs": 2, "batch_size": 16, "evaluate": {"attack_steps": 2}}
    hf.train({"name": "plain", **plain, **how}, out="training/plain", progress=False)
    expected = {"logits": make_models(hf.load_data("data.npz").test.x[:8])}

    holdfast(*AUDIT, "--out", "audit/finished")
    holdfast(*AUDIT, "--out", "audit/killed", after=60, code=-9)
    os.remove("audit/finished/report.html")  # large, and made of the other files
    audit = json.loads(Path("audit/finished/audit.json").read_text())
    expected["audit"] = {key: audit[key] for key in ("headline", "clean_accuracy", "created")}
    expected["audit"]["brackets"] = [{key: part[key] for key in BRACKET} for part in audit["brackets"]]
    holdfast(*ATTACK, "--out", "attack/finished")
    holdfast(*ATTACK, "--out", "attack/killed", after=9, code=-9)
    os.mkdir("certify")
    holdfast(*CERTIFY, "--out", "certify/crown.csv")
    holdfast(*SMOOTHING, "--out", "certify/finished.csv")
    holdfast(*SMOOTHING, "--out", "certify/interrupted.csv", after=15, signal="SIGINT", code=130)
    holdfast(*COMPARE, "--out", "compare/finished")
    holdfast(*COMPARE, "--out", "compare/killed", after=1500, code=-9)
    holdfast("watermark", "embed", *MARK, "--out", "watermark")
    holdfast(*PROOF, "--out", "watermark/finished")
    holdfast(*PROOF, "--out", "watermark/killed", after=80, code=-9)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    main()

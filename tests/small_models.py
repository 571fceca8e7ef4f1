"""Every architecture of the catalogue, made small."""

import torch
from torch import nn

from holdfast.models import catalog, list_models, make_model

NAMES = [row.name for row in list_models()]
RANDOM = ("adv-bnn", "rse")
"""Architectures that draw random numbers in every pass."""
SMALL = {
    "channels": (2, 4, 3, 5),
    "blocks": (1, 1, 1, 1),
    "stem_channels": 3,
    "dim": 8,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 8,
    "patch": 4,
    "neck": 6,
    "features": 6,
    "members": 2,
}
"""Options that make a model small, wherever it has them."""
SIZES = {"8c2f": (36, 38), "graddiv-stl": (96, 97), "lenet": (28, 28), "lenet-padded": (28, 28), "vgg16": (32, 32)}
SIZES |= {"resnet-wong": (4, 8)}


def small(name):
    """The model with thin layers and small images, statistics as if it were trained, and the shape of its inputs."""
    entry = catalog._ENTRIES[name]
    known = {option.name: option.default for option in entry.options().values()}
    options = {key: value for key, value in SMALL.items() if key in known}
    if "layers" in known:
        options["layers"] = tuple(
            layer if isinstance(layer, str) else (2 if layer[0] < 64 else 4, *layer[1:]) for layer in known["layers"]
        )
    if known.get("hidden"):
        options["hidden"] = (6,) * len(known["hidden"])
    if "width" in known:
        small_width = 4 if "neck" in known else 1
        options["width"] = 0.3 if name == "lenet" else small_width
    if name.startswith("wrn"):
        options["depth"] = 10
    if name.startswith("resnet-wong"):
        options["blocks"] = 1
    if entry.composite:
        options |= {"layers": ((2, 4, 2, 1), (2, 4, 2, 1)), "hidden": (6,)}
    if name == "masked":
        options |= {"rate": 0.5, "gamma": 1.0}
    shape = (entry.input_shape[0], *SIZES.get(name.removesuffix("-minmax"), (8, 12)))
    torch.manual_seed(0)
    model = make_model(name, input_shape=shape, classes=3, seed=0, **options)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval(), torch.rand(2, *shape)

"""One scale for the loss of all networks: logits divided by the norms of the layers.

Multiplying the weights of a ReLU network by a constant leaves its answers as they are and changes its loss. Networks
that were found in different ways are compared at equal loss after W_l <- W_l / c_l and b_l <- b_l / (c_1 ... c_l), with
c_l = |W_l|_F / divisor. By positive homogeneity the logits are then the old ones divided by c_1 ... c_L.

The divisor sets the scale of the loss: 3 for a LeNet, 1 for a perceptron with one hidden layer and for linear models
(Chiang et al., "Loss landscapes are all you need: neural network generalization can be explained without the implicit
bias of gradient descent", 2023; the numbers are in the published code only).
"""

import torch
from torch import Tensor

from holdfast.analyze.volume.family import Family
from holdfast.errors import UnsupportedError


def layer_scales(family: Family, weights: Tensor, divisor: float) -> Tensor:
    """c_l = |W_l|_F / divisor of each network and layer, (M, L), for weights (M, P)."""
    norms = [torch.linalg.vector_norm(weights[:, place], dim=1) for place in family.matrices]
    return torch.stack(norms, 1) / divisor


def loss_scale(family: Family, weights: Tensor, divisor: float) -> Tensor:
    """c_1 ... c_L, by which the logits of each network are divided, (M,)."""
    return layer_scales(family, weights, divisor).prod(1).clamp_min(torch.finfo(weights.dtype).tiny)


def normalised(family: Family, weights: Tensor, divisor: float) -> Tensor:
    """The same networks with normalised weights, (M, P): their logits are the old ones divided by `loss_scale`.

    A bias belongs to the matrix before it in the order of the parameters.
    """
    scales, found = layer_scales(family, weights, divisor), weights.clone()
    products, layer = scales.cumprod(1), -1
    for _, place, shape in family.places:
        layer += len(shape) > 1
        if layer >= 0:
            found[:, place] /= (scales if len(shape) > 1 else products)[:, layer, None]
    return found


def check_homogeneous(family: Family, x: Tensor, divisor: float) -> None:
    """Refuse an architecture for which the two forms of the normalisation differ, such as one with a sigmoid."""
    if not family.matrices:
        raise UnsupportedError("the architecture has no weight matrix to normalise by; give divisor=None")
    weights = family.draw(2, seed=0, like=x)
    with torch.no_grad():
        divided = family.logits(weights, x) / loss_scale(family, weights, divisor)[:, None, None]
        scaled = family.logits(normalised(family, weights, divisor), x)
    if not torch.allclose(divided, scaled, rtol=1e-3, atol=1e-3 * float(divided.abs().max())):
        raise UnsupportedError(
            "the answers of this architecture change when its layers are rescaled (it is not positively homogeneous, "
            "as with sigmoid, tanh, layer norm or skip connections with biases), so its loss cannot be normalised; "
            "give divisor=None to compare raw losses"
        )

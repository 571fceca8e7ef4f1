"""Networks that draw their weights (Adv-BNN) or their activations (RSE) anew at each pass."""

from holdfast.models.random.gaussian_weights import GaussianLayer, adv_bnn, gaussian_divergence
from holdfast.models.random.noise_layers import NoisyInput, rse
from holdfast.models.random.random_network import DRAWS, RandomLayer, RandomNetwork, check_function, draws_noise

__all__ = [
    "DRAWS",
    "GaussianLayer",
    "NoisyInput",
    "RandomLayer",
    "RandomNetwork",
    "adv_bnn",
    "check_function",
    "draws_noise",
    "gaussian_divergence",
    "rse",
]

"""How a run finds its adversarial examples: one file per family. Importing this package registers them all."""

from holdfast.training.attack.cached import atas, atta
from holdfast.training.attack.fgsm import fgsm, fgsm_rs, n_fgsm
from holdfast.training.attack.iat import instance_adaptive
from holdfast.training.attack.pgd import pgd

__all__ = ["atas", "atta", "fgsm", "fgsm_rs", "instance_adaptive", "n_fgsm", "pgd"]

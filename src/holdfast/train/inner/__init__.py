"""How a run finds its adversarial examples: one file per family. Importing this package registers them all."""

from holdfast.train.inner.adaptive import instance_adaptive
from holdfast.train.inner.cached import atas, atta
from holdfast.train.inner.single_step import fgsm, fgsm_rs, n_fgsm
from holdfast.train.inner.steps import pgd

__all__ = ["atas", "atta", "fgsm", "fgsm_rs", "instance_adaptive", "n_fgsm", "pgd"]

"""How a run finds its adversarial examples: one file per method. Importing this package registers them all."""

from holdfast.training.attack import atas, atta, fgsm, iat, pgd  # noqa: F401

"""How a run finds its adversarial examples: one file per method. Importing this package registers them all."""

from holdfast.training.attack import (  # noqa: F401
    atas,
    atta,
    fgsm,
    iat,
    pgd,
)

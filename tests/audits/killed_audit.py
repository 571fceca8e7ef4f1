"""Run by test_audit_resume.py as a process of its own: an audit that stops for ever in the middle of the attack."""

import sys
import time
from importlib import import_module

import torch
from torch import nn

OPTIONS = {
    "budgets": 3,
    "batch_size": 10,
    "progress": False,
    "attack": "pgd",
    "attack_options": {"steps": 5, "loss": "margin"},
    "certify": "crown",
    "budget": "standard",
}


def task():
    """The same model and data wherever it is called: one quarter breaks at each budget or so."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    x = torch.rand(60, 1, 3, 4, generator=generator)
    y = model(x).argmax(1)
    y[::9] = (y[::9] + 1) % 3
    return model, (x, y)


def main(folder, calls):
    import holdfast as hf
    from holdfast.audits import audit

    torch.set_num_threads(1)
    tasks = import_module("holdfast.audits.task")
    real = tasks.run_attack
    seen = []

    def stuck(*args, **kwargs):
        seen.append(1)
        if len(seen) > calls:
            sys.stdout.write("stuck\n")
            sys.stdout.flush()
            time.sleep(600)
        return real(*args, **kwargs)

    tasks.run_attack = stuck
    model, data = task()
    audit(model, data, hf.Linf(0.15), out=folder, **OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The main job on two models: train one plainly and one adversarially, bracket both, put them on one page.

Run it again after Ctrl-C or a kill: it goes on where it stopped, and what is finished is not repeated.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import holdfast as hf
from holdfast.audits import render
from holdfast.training import Interrupted

RECIPES = ("mnist-mini-standard", "mnist-mini-at")
THREAT = hf.Linf(0.1)


def get_model(recipe: str, folder: Path, **overrides: Any) -> hf.TrainResult | None:
    """Train the model of `folder`, from the checkpoint if there is one; return None if it is finished already."""
    if (folder / "model.safetensors").is_file():
        return None
    started = (folder / "checkpoints" / "last.pt").is_file()
    return hf.train(recipe, out=folder, resume=started, force=not started, **overrides)


def demo(out: Path, *, n: int, n_pgd: int, **overrides: Any) -> None:
    """Train and audit both models under `out`; `n` inputs for the bracket, `n_pgd` for PGD with 40 steps only."""
    console = Console()
    data = hf.load_data("mnist-mini")
    audits, pgd = [], []
    for recipe in RECIPES:
        folder = out / recipe
        console.print(f"{recipe}: training ...")
        if get_model(recipe, folder, **overrides) is None:
            console.print(f"{recipe}: was trained before, in {folder}")
        model = hf.load_model(folder / "model.safetensors")
        console.print(f"{recipe}: auditing ...")
        audits.append(hf.audit(model, data, THREAT, n=n, out=folder / "audit", name=recipe))
        console.print(audits[-1].table())
        options: dict[str, Any] = {"attack": "pgd", "attack_options": {"steps": 40}, "certify": None}
        pgd.append(hf.audit(model, data, THREAT, n=n_pgd, budgets=1, out=folder / "pgd", name=recipe, **options))
    for result in pgd:
        accuracy = f"{result.attacked[-1]:.1%} under PGD with 40 steps at {THREAT}"
        text = f"{result.name}: {accuracy}, {result.clean:.1%} clean, on {result.inputs} test inputs"
        console.print(text, soft_wrap=True)
    report = out / "report.html"
    report.write_text(render(audits), encoding="utf-8")
    console.print(f"report: {report}", soft_wrap=True)


def main() -> None:
    """Reads the options and runs the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for models, audits and report")
    parser.add_argument("--n", type=int, default=200, help="test inputs for the brackets")
    parser.add_argument("--n-pgd", type=int, default=2000, help="test inputs for PGD only; 2000 is the whole split")
    parser.add_argument("--epochs", type=int, help="epochs of both trainings; as the recipes say if not given")
    options = parser.parse_args()
    overrides = {} if options.epochs is None else {"epochs": options.epochs}
    try:
        demo(options.out, n=options.n, n_pgd=options.n_pgd, **overrides)
    except (Interrupted, KeyboardInterrupt):
        sys.exit("interrupted; what is done is kept, the same command goes on from there")
    except hf.HoldfastError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""The wedge: wide networks can fit it badly, but guess and check, which has no gradients, finds the good fits."""

from pathlib import Path

from holdfast.analyze.plots.boundaries import boundaries_svg
from holdfast.analyze.volume.toys import wedge_study
from holdfast.analyze.volume.wedge import wedge_task


def main(out: Path = Path("wedge.svg"), *, units: tuple[int, ...] = (2, 10, 20), guesses: int = 200_000) -> None:
    """Guess networks of three widths that fit 11 points, poison others, and draw what they decide."""
    rows = {}
    for found in wedge_study(units, guesses=guesses):
        good = f"{found.accuracy.mean():.2f}" if len(found.accuracy) else "none"
        bad = f"{found.poisoned_accuracy[0]:.2f}" if len(found.poisoned) else "none"
        print(f"{found.units} hidden units: volume of the fits {found.volume}")
        print(
            f"  accuracy when guessed: {good} on fresh points; of the worst poisoned network on its test points: {bad}"
        )
        rows[f"guessed, {found.units} units, accuracy {good}"] = (found.family, found.guessed)
        rows[f"poisoned, {found.units} units"] = (found.family, found.poisoned)
    train, _ = wedge_task()
    print("boundaries:", boundaries_svg(rows, train.x, train.y, title="The wedge").save(out))


if __name__ == "__main__":
    main()

"""Attack a model: how many test inputs does a small change of every pixel break?"""

import holdfast as hf


def main(*, epochs: int = 2, n: int = 200) -> None:
    """Train a model for a few seconds, attack it, and show what became of the first inputs it broke."""
    data = hf.load_data("mnist-mini")
    model = hf.train("mnist-mini-standard", epochs=epochs).model
    x, y = data.test.x[:n], data.test.y[:n]
    result = hf.attack(model, x, y, hf.Linf(0.1), method="pgd", steps=20)

    print(f"broken: {result.success.float().mean():.1%} of {n}")
    for i in [i for i, by in enumerate(result.by) if by == "pgd"][:5]:  # "clean" is wrong to begin with
        after = int(model(result.x_adv[i : i + 1]).argmax())
        print(f"input {i}: a {int(y[i])}, now taken for a {after}")


if __name__ == "__main__":
    main()

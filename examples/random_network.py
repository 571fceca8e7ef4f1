"""A network that draws its weights: its prediction, one draw of it, and attacks that average over draws."""

import holdfast as hf
from holdfast.analyze.concentration import concentration
from holdfast.attacks.eot_grid import eot_grid_of, published, stronger


def main(*, epochs: int = 6, inputs: int = 50, steps: int = 30, samples: int = 10) -> None:
    """Train Adv-BNN with GradDiv, measure its gradients, and attack it as published and harder."""
    model = hf.train("mnist-mini-adv-bnn-graddiv", epochs=epochs).model
    data = hf.load_data("mnist-mini")
    x, y = data.test.x[:inputs], data.test.y[:inputs]
    print(f"right by the mean softmax of 20 draws: {int((model.predict(x) == y).sum())} of {inputs}")

    found = concentration(model, x, y, draws=20)
    print(f"mean resultant length of the gradients over draws: {float(found.resultant.mean()):.2f}")

    grid = eot_grid_of(model, x, y, hf.Linf(0.1), (*published((1, samples)), *stronger(samples, steps)))
    for name, accuracy in zip(grid.names, grid.confirmed, strict=True):
        print(f"{name}: {accuracy:.0%} left")
    print(f"minimum over all: {grid.minimum:.0%}")

    one = model.sample(0)  # a plain network: what holds for it says nothing about the ensemble
    proved = hf.certify(one, x, y, hf.Linf(0.001), "ibp").certified
    print(f"one draw is proved at linf 0.001 on {int(proved.sum())} of {inputs}; the ensemble has no certificate")


if __name__ == "__main__":
    main()

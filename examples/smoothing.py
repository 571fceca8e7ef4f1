"""Smooth a classifier with noise: what the vote of its noisy copies can prove, and what the proof costs."""

import holdfast as hf


def main(*, epochs: int = 2, inputs: int = 20, n: int = 2000, sigma: float = 0.25) -> None:
    """Train a linear classifier with noise and certify the smoothed one at growing radii."""
    data = hf.load_data("mnist-mini")
    model = hf.train("mnist-mini-gaussian", epochs=epochs, model=hf.make_model("linear")).model
    smoothed = hf.Smoothed(model, sigma, n=200).eval()
    x, y = data.test.x[:inputs], data.test.y[:inputs]

    answers = smoothed.predict(x)
    print(f"right: {int((answers == y).sum())} of {inputs}, abstained: {int((answers < 0).sum())}")
    for radius in (0.1, 0.25, 0.5):
        drawn = {}
        result = smoothed.certify(x, y, radius, n=n, watch=lambda counts, left, drawn=drawn: drawn.update(now=counts))
        samples = float(drawn["now"].drawn.double().mean())
        proved = int(result.certified.sum())
        print(f"l2 {radius}: {proved} proved, {samples:.0f} samples per input, each wrong with p <= {result.alpha}")


if __name__ == "__main__":
    main()

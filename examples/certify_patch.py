"""Certify a model against patches: a proof for every place of the patch and every content."""

import holdfast as hf


def main(*, epochs: int = 2, n: int = 50, largest: int = 4) -> None:
    """Train a linear classifier, for which the interval certificate is exact, and try patches of growing size."""
    data = hf.load_data("mnist-mini")
    model = hf.train("mnist-mini-standard", epochs=epochs, model=hf.make_model("linear")).model
    x, y = data.test.x[:n], data.test.y[:n]

    for side in range(1, largest + 1):
        patch = hf.Patch(side, side)
        places = len(patch.locations(x.shape[1:]))
        result = hf.certify(model, x, y, patch, method="ibp")
        print(f"{patch}: {result.certified.float().mean():.1%} of {n} proved to hold, at all {places} places")


if __name__ == "__main__":
    main()

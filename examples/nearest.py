"""Bracket the robust radius of single inputs: what is proved below, the nearest example found above."""

import holdfast as hf


def main(*, epochs: int = 2, n: int = 8, norm: str = "linf") -> None:
    """Train a model for a few seconds, then print one row for each input."""
    data = hf.load_data("mnist-mini")
    model = hf.train("mnist-mini-standard", epochs=epochs).model
    x, y = data.test.x[:n], data.test.y[:n]
    below = hf.radius(model, x, y, norm)
    above = hf.nearest(model, x, y, norm)
    after = model(above.x_adv).argmax(1)

    print(f"input  digit  proved  broken at  ratio  now  found by   ({norm})")
    for i in range(n):
        lower, upper = float(below[i]), float(above.distance[i])
        ratio = upper / lower if lower > 0 else float("nan")  # a misclassified input has the radius zero
        print(f"{i:5d}  {int(y[i]):5d}  {lower:.4f}     {upper:.4f}  {ratio:5.2f}  {int(after[i]):3d}  {above.by[i]}")


if __name__ == "__main__":
    main()

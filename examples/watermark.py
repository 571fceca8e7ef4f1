"""Put a watermark into a small network, and certify that no small change of its weights removes it."""

import holdfast as hf
from holdfast.apps import watermark as wm


def main(*, epochs: int = 3, inputs: int = 3000, copies: int = 200) -> None:
    """Embed triggers with a text, certify them, and attack the weights within the radius."""
    data, sigma, radius = hf.load_data("mnist-mini"), 0.3, 0.5
    triggers = wm.content_triggers(data.train, 10, text="OWNER", label=4)  # keep it secret
    options = wm.EmbedOptions(
        noise=0.4,  # on the weights, while the triggers are learnt
        levels=4,
        samples=4,
        step_per_level=True,
        warm_up=1,
        epochs=epochs,
        batch_size=32,
        trigger_batch=25,
        clip_norm=1.0,  # small networks diverge without
    )
    new = hf.make_model("cnn", layers=[[8, 4, 2, 1], [16, 4, 2, 1]], hidden=[64], seed=0)
    model, _ = wm.embed(new, data.train.x[:inputs], data.train.y[:inputs], triggers, options)
    right = (model(data.test.x).argmax(1) == data.test.y).float().mean()
    certificate = wm.certify_watermark(model, triggers, [radius], sigma=sigma, n=copies)
    print(f"{right:.1%} of the test images are right, {certificate.accuracy:.0%} of the triggers")
    print(f"weights moved by less than {radius}: median under noise at least {certificate.certified[0]:.0%}")
    stolen = wm.parameter_pgd(model, triggers.x, triggers.y, radius, steps=10, sigma=sigma)
    verdict = wm.verify_white_box(stolen, triggers, sigma=sigma, n=100, original=model)
    print(f"worst change found within {radius}: {verdict.accuracy:.0%}, p-value {verdict.p_value:.0e}")


if __name__ == "__main__":
    main()

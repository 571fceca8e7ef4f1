"""Certify an object detector: which digits of a scene does it find under every small change of the image?"""

import holdfast as hf
from holdfast.apps import detection
from holdfast.data import detection_scenes


def main(*, scenes: int = 700, epochs: int = 5, images: int = 3, n: int = 200, epsilon: float = 0.1) -> None:
    """Train a small detector for a few seconds, smooth it, and print what is proved about a few scenes."""
    model = detection.train_tiny(detection_scenes(scenes, most=2), sigma=0.25, epochs=epochs, batch=16, lr=1e-2)
    smoothed = detection.SmoothedDetector(detection.tiny_detector(model, objectness=0.3), sigma=0.25, n=n)
    test = detection_scenes(images, most=2, split="test")
    truth = test.objects()

    proved = smoothed.certify(test.x, epsilon)
    for i, certified in enumerate(proved):
        print(f"scene {i}: {truth[i][1].tolist()}, found {certified.detections[:, 6].int().tolist()}")
        for low, high, label in zip(certified.lower, certified.upper, certified.label, strict=True):
            if label >= 0:
                edges = (f"{a:.0f} to {b:.0f}" for a, b in zip(low[:4].tolist(), high[:4].tolist(), strict=True))
                print(f"  a {label}, left, top, right, bottom edge at {', '.join(edges)}")

    x_adv = detection.dag(model.scores, test.x, truth, hf.L2(epsilon), sigma=0.25)
    least, attacked = detection.certified_count(proved, truth), detection.count(smoothed.detect(x_adv), truth)
    print(f"recall at l2:{epsilon}: at least {least.recall:.0%}, attacked {attacked.recall:.0%}")


if __name__ == "__main__":
    main()

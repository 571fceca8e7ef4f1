"""Times our own attacks, bounds and explanations in two source trees: did a change of the code cost speed?

    python benchmarks/before_after.py BEFORE/src AFTER/src --rounds 6

Each round starts a process for either tree, in turn, since the place of a process in memory makes up to a fifth of its
time. A call's figure is its best median of five over the rounds, in CPU time, with one thread, on a small CNN that the
first process trains for an epoch on mnist-mini and keeps in a temporary folder.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, describe_markdown, describe_run, markdown_table


def measure(source: str, weights: str) -> dict[str, float]:
    """CPU seconds of each call in the tree `source`."""
    sys.path.insert(0, source)
    import torch
    from torch import nn

    import holdfast as hf

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = hf.load_data("mnist-mini")
    x, y = data.test.x[:128], data.test.y[:128]
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(1568, 100), nn.ReLU(), nn.Linear(100, 10)),
    )
    if not Path(weights).exists():
        optimizer = torch.optim.Adam(net.parameters(), 2e-3)
        for rows in torch.randperm(len(data.train.x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data.train.x[rows]), data.train.y[rows]).backward()
            optimizer.step()
        torch.save(net.state_dict(), weights)
    net.load_state_dict(torch.load(weights, weights_only=True))
    net.eval()
    large, small = hf.Linf(0.05), hf.Linf(0.02)
    calls = {
        "attack pgd": lambda: hf.attack(net, x, y, large, "pgd", steps=20),
        "attack apgd-ce": lambda: hf.attack(net, x, y, large, "apgd-ce", steps=30),
        "attack square": lambda: hf.attack(net, x, y, large, "square", queries=200),
        "attack cascade": lambda: hf.attack(net, x[:48], y[:48], large, "cascade"),
        "attack fab": lambda: hf.attack(net, x[:48], y[:48], large, "fab"),
        "bounds ibp": lambda: hf.bounds(net, x, small, "ibp"),
        "certify ibp": lambda: hf.certify(net, x, y, small, "ibp"),
        "certify crown-ibp": lambda: hf.certify(net, x, y, small, "crown-ibp"),
        "certify crown": lambda: hf.certify(net, x[:16], y[:16], small, "crown"),
        "certify alpha-crown": lambda: hf.certify(net, x[:8], y[:8], small, "alpha-crown"),
        "explain saliency": lambda: hf.explain(net, x, y, "saliency"),
        "explain integrated-gradients": lambda: hf.explain(net, x[:32], y[:32], "integrated-gradients"),
        "explain smoothgrad": lambda: hf.explain(net, x[:32], y[:32], "smoothgrad"),
        "explain big": lambda: hf.explain(net, x[:8], y[:8], "big"),
    }
    return {name: timed(call) for name, call in calls.items()}


def timed(call, repetitions: int = 5) -> float:
    """Median of a few calls after a first one."""
    call()
    seconds = []
    for _ in range(repetitions):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return sorted(seconds)[repetitions // 2]


def main() -> None:
    """Measure both trees in turn and write benchmarks/results/before_after.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.before, given.measure)))
        return
    found: dict[str, list[dict[str, float]]] = {given.before: [], given.after: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            for source in found:
                words = [sys.executable, __file__, source, source, "--measure", f"{folder}/weights.pt"]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                found[source].append(json.loads(done.stdout))
    rows = []
    for name in found[given.before][0]:
        before, after = (1e3 * min(one[name] for one in found[source]) for source in (given.before, given.after))
        rows.append((name, f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}"))
    table = markdown_table(("call", "before, ms", "after, ms", "ratio"), rows)
    text = f"# Our own calls in two source trees\n\n{describe_markdown(describe_run(['torch']))}\n\n{table}\n"
    (RESULTS / "before_after.md").write_text(text, encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()

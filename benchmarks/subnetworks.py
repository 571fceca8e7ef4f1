"""Robust sub-networks on the embedded MNIST: claims of the source at a size that a CPU affords.

    python benchmarks/subnetworks.py [PART ...] [--seconds N]

Parts: gamma, lenet, cap, norm, norm-cnn, weights, fast, table, table-0.2, bounds. Every run is one entry of
results/subnetworks.json and is not repeated; after N seconds no new run begins, and the same command goes on. Runs are
short (see `SETTING`): they are compared with each other, not with the published tables.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Judgement,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claims,
    verdict_of,
    write_results,
)
from torch import nn

import holdfast as hf
from holdfast.models import count_parameters, save_model
from holdfast.models.compact import save_compact
from holdfast.models.masked import patterns, pruned

SEEDS = (0, 1, 2)
SETTING: dict[str, Any] = {
    "data": "mnist-mini",
    "threat": "linf:0.1",
    "epochs": 8,
    "batch_size": 64,
    "validation": 0.6,  # 4,000 of the 10,000 images are trained on; the first 200 of the rest choose the epoch
    "model": {"name": "mlp", "hidden": [256, 256]},
    "objective": {"name": "at"},
    "attack": {"name": "pgd", "steps": 3},
    "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "learning_rate": {"name": "cosine"},
    "evaluate": {"attack_steps": 5, "count": 200},
}
POPUP = {"name": "edge-popup", "rate": 0.99, "gamma": 0.1, "weights": "binary", "score_scale": 0.01}
CACHED = {"name": "atta", "step": 0.5}
PER_LAYER = {"name": "adam", "lr": 2e-3}
LENET = {"name": "lenet-padded", "width": 4}
NORMED = {"name": "cnn", "layers": [[32, 4, 2, 1], [64, 4, 2, 1]], "hidden": [100], "batch_norm": True}
SMALL = 3  # dense twin: 784 * 3 + 3 * 3 + 3 * 10 weights and 16 biases, 2,407 values; the sub-network keeps 2,688
NARROW = {"name": "cnn", "layers": [[5, 5, 4, 1], [6, 3, 3, 1]], "hidden": []}  # 956 floats, less than its file
SIGNS = 26  # dense twin of one bit a weight: 784 * 26 + 26 * 26 + 26 * 10 weights in a file of the same size


def gamma_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Rates and exponents of Table 5.2."""
    for rate in (0.5, 0.9, 0.99):
        for gamma in (0.1, 1.0):
            yield f"r={rate} gamma={gamma}", {"prune": {**POPUP, "rate": rate, "gamma": gamma}}


def lenet_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Table 5.2 on a convolutional network, and where layers that are kept whole may keep half."""
    for rate in (0.5, 0.9, 0.99):
        for gamma in (0.1, 1.0):
            yield f"r={rate} gamma={gamma}", {"prune": {**POPUP, "rate": rate, "gamma": gamma}, "model": LENET}
    yield "r=0.9 gamma=0.1 cap=0.5", {"prune": {**POPUP, "rate": 0.9, "cap": 0.5}, "model": LENET}


def cap_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Why the fixed rate is ahead where few weights are pruned: layers that are kept whole cannot be learned."""
    for rate in (0.5, 0.9):
        yield f"r={rate} gamma=0.1 cap=0.5", {"prune": {**POPUP, "rate": rate, "cap": 0.5}}


def norm_runs(**changes: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Table 5.3: the last batch norm and the scale of the scores."""
    for last in (True, False):
        for scale in (0.001, 0.1, 1.0):
            name = f"{'LBN' if last else 'no LBN'} a={scale}"
            yield name, {"prune": {**POPUP, "last_batch_norm": last, "score_scale": scale}, **changes}


def weights_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Table 5.4: signed Kaiming constants beside the binary weights of the part `gamma`."""
    yield "kaiming LBN", {"prune": {**_without("score_scale"), "weights": "kaiming-constant"}}


def fast_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Algorithm 5.2: one step from a cached perturbation, whole and at half the resolution."""
    yield "cached 28x28", {"prune": POPUP, "attack": CACHED}
    yield "cached 14x14", {"prune": POPUP, "attack": {**CACHED, "resolution": 14}}


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in POPUP.items() if name != key}


PARTS: dict[str, Callable[[], Iterator[tuple[str, dict[str, Any]]]]] = {
    "gamma": gamma_runs,
    "lenet": lenet_runs,
    "cap": cap_runs,
    "norm": norm_runs,
    "norm-cnn": partial(norm_runs, model=NORMED),
    "weights": weights_runs,
    "fast": fast_runs,
}
TABLES = {"table": "linf:0.1", "table-0.2": "linf:0.2"}


Trained = tuple[nn.Module, float]  # with the seconds of training


def accuracies(model: nn.Module, threat: str, *, attack: str, n: int) -> dict[str, float]:
    """Clean and robust accuracy on the first `n` test inputs."""
    test = hf.load_data(SETTING["data"]).test[:n]
    options: dict[str, Any] = {"steps": 20} if attack == "pgd" else {}
    found = hf.attack(model, test.x, test.y, threat, method=attack, **options)
    with torch.no_grad():
        right = model(test.x).argmax(1) == test.y
    return {"clean": float(right.float().mean()), "robust": float((right & ~found.success).float().mean())}


def train_once(changes: dict[str, Any], seed: int, *, model: nn.Module | None = None, **overrides: Any) -> Trained:
    """The trained model and the seconds of training."""
    started = time.perf_counter()
    result = hf.train({**SETTING, **changes, "seed": seed, **overrides}, model=model, progress=False)
    return result.model, time.perf_counter() - started


def normed(seed: int) -> nn.Module:
    """The dense network with a last batch norm."""
    return nn.Sequential(hf.make_model(**SETTING["model"], seed=seed), nn.BatchNorm1d(10, affine=False))


def run_sweep(record: dict[str, Any], parts: list[str], until: float, out: Path) -> bool:
    """The runs of the parts that are missing; False if time ran out."""
    for part in parts:
        rows = record.setdefault(part, {})
        for seed in SEEDS:
            for name, changes in PARTS[part]():
                key = f"{name} seed={seed}"
                if key in rows:
                    continue
                if time.monotonic() > until:
                    return False
                model, seconds = train_once(changes, seed)
                kept = sum(int(pattern.sum()) for pattern in patterns(model).values())
                scores = accuracies(pruned(model), SETTING["threat"], attack="pgd", n=500)
                rows[key] = {**scores, "kept": kept, "seconds": round(seconds, 1)}
                keep(record, out)
                print(part, key, rows[key], flush=True)
    return True


def hydra(
    train: Callable[..., Trained], seed: int, folder: Path, *, gamma: float = 0.1, last_batch_norm: bool = False
) -> Trained:
    """Pre-train, prune, fine-tune; each phase for as many epochs as the other methods have in all."""
    file = folder / "hydra.safetensors"

    def phase(changes: dict[str, Any]) -> Trained:
        model = normed(seed) if last_batch_norm else None
        return train({**changes, "optimizer": PER_LAYER}, seed, model=model)

    dense, first = phase({})
    save_model(dense, file)
    kept, second = phase({"prune": {"name": "hydra-prune", "rate": 0.99, "gamma": gamma}, "init": str(file)})
    save_model(kept, file)
    tuned, third = phase({"prune": {"name": "hydra-fine-tune"}, "init": str(file)})
    return tuned, first + second + third


def table_methods(threat: str, seed: int, folder: Path) -> Iterator[tuple[str, Callable[[], Trained]]]:
    """The methods of Table 5.7 that are built, at the same rate, and dense networks as large as their files."""
    train = partial(train_once, threat=threat)
    rst = {**_without("score_scale"), "weights": "kaiming-normal", "gamma": 1.0}
    dense = {"optimizer": PER_LAYER}
    trades = {**dense, "objective": {"name": "trades"}}
    signs = {**dense, "prune": {"name": "binary-connect", "last_batch_norm": True}}
    hidden = {n: {"model": {"name": "mlp", "hidden": [n, n]}} for n in (SMALL, SIGNS)}
    yield "AT, dense", lambda: train(dense, seed)
    yield "AT, dense, LBN", lambda: train(dense, seed, model=normed(seed))
    yield "TRADES, dense", lambda: train(trades, seed)
    yield "TRADES, dense, LBN", lambda: train(trades, seed, model=normed(seed))
    yield "AT, dense, same number of weights", lambda: train({**dense, **hidden[SMALL]}, seed)
    yield "AT, dense, same size in bits", lambda: train({**dense, "model": NARROW}, seed)
    yield "BinaryConnect, dense", lambda: train(signs, seed)
    yield "BinaryConnect, dense, same size in bits", lambda: train({**signs, **hidden[SIGNS]}, seed)
    yield "RST, gamma 1", lambda: train({"prune": rst}, seed)
    yield "RST, gamma 1, no LBN", lambda: train({"prune": {**rst, "last_batch_norm": False}}, seed)
    yield "HYDRA, gamma 0.1", lambda: hydra(train, seed, folder)
    yield "HYDRA, gamma 1", lambda: hydra(train, seed, folder, gamma=1.0)
    yield "HYDRA, gamma 0.1, LBN", lambda: hydra(train, seed, folder, last_batch_norm=True)
    one = {**POPUP, "gamma": 1.0}
    yield "binary sub-network, gamma 0.1", lambda: train({"prune": POPUP}, seed)
    yield "binary sub-network, gamma 0.1, cached", lambda: train({"prune": POPUP, "attack": CACHED}, seed)
    yield "binary sub-network, gamma 1", lambda: train({"prune": one}, seed)
    yield "binary sub-network, gamma 1, cached", lambda: train({"prune": one, "attack": CACHED}, seed)


def run_table(record: dict[str, Any], part: str, until: float, out: Path) -> bool:
    """The table of methods, with AutoAttack on 200 inputs; False if time ran out."""
    rows, threat = record.setdefault(part, {}), TABLES[part]
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for name, make in table_methods(threat, seed, Path(folder)):
                key = f"{name} seed={seed}"
                if key in rows:
                    continue
                if time.monotonic() > until:
                    return False
                model, seconds = make()
                plain = pruned(model)
                size = save_compact(plain, Path(folder) / "model.safetensors", whole=True).size
                scores = accuracies(plain, threat, attack="autoattack", n=200)
                kept = sum(int((p != 0).sum()) for p in plain.parameters())
                rows[key] = {**scores, "kept": kept, "bytes": size, "seconds": round(seconds, 1)}
                keep(record, out)
                print(part, key, rows[key], flush=True)
    return True


def run_bounds(record: dict[str, Any], until: float, out: Path) -> bool:
    """Time and width of bounds, and inference: a sub-network, dense and as torch's sparse matrices, beside a dense one.

    Both networks are trained against the same attack, and the width is taken in units of the spread of the logits.
    """
    if "bounds" in record or time.monotonic() > until:
        return "bounds" in record
    model, _ = train_once({"prune": POPUP}, 0)
    plain = pruned(model)
    dense = train_once({"optimizer": PER_LAYER}, 0)[0].eval()
    x = hf.load_data(SETTING["data"]).test.x[:64]
    rows: dict[str, Any] = {"weights": count_parameters(dense)}
    for name, network in (("AT, dense", dense), ("sub-network, dense matrices", plain)):
        memory = sum(layer.weight.nbytes for layer in network.modules() if isinstance(layer, nn.Linear))
        rows[name] = {"inference ms": _milliseconds(lambda n=network: n(x)), "bytes of the weights": memory}
        for method in ("ibp", "crown"):
            rows[name][f"{method} ms"] = _milliseconds(
                lambda n=network, m=method: hf.bounds(n, x, "linf:0.01", method=m)
            )
            width = hf.bounds(network, x, "linf:0.01", method=method)
            with torch.no_grad():
                ratio = (width.upper - width.lower).mean() / network(x).std(1).mean()
            rows[name][f"{method} width / logit spread"] = float(ratio)
    sparse = [layer.weight.detach().to_sparse_csr() for layer in plain.modules() if isinstance(layer, nn.Linear)]
    flat = x.flatten(1).T.contiguous()

    def product() -> torch.Tensor:
        h = flat
        for i, weight in enumerate(sparse):
            h = weight @ h if i + 1 == len(sparse) else (weight @ h).relu()
        return h

    norm = plain[-1]
    assert isinstance(norm, nn.BatchNorm1d)

    def whole() -> torch.Tensor:
        return norm(product().T)

    with torch.no_grad():
        assert torch.allclose(whole(), plain(x), atol=1e-3)  # the same network, or there is nothing to compare
    memory = sum(part.nbytes for w in sparse for part in (w.crow_indices(), w.col_indices(), w.values()))
    rows["sub-network, sparse matrices (CSR)"] = {
        "inference ms": _milliseconds(whole),
        "bytes of the weights": memory,
    }
    record["bounds"] = rows
    keep(record, out)
    return True


def _milliseconds(work: Callable[[], object], times: int = 20) -> float:
    """The median of several runs."""
    with torch.no_grad():
        work()
        taken = []
        for _ in range(times):
            started = time.process_time()
            work()
            taken.append(1000 * (time.process_time() - started))
    return round(statistics.median(taken), 3)


def keep(record: dict[str, Any], out: Path) -> None:
    """Write what there is."""
    record["run"] = describe_run(("torch", "holdfast"))
    record["setting"] = SETTING
    write_results("subnetworks", record, to_markdown(record), out)


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the runs so far say of the claims, where all seeds are there."""
    rows = {part: by_name(record.get(part, {})) for part in (*PARTS, *TABLES)}

    def robust(part: str, name: str) -> list[float]:
        return [run["robust"] for run in rows[part].get(name, ())]

    def compare(claim: str, better: tuple[str, str], worse: tuple[str, str], slack: float = 0.0) -> Iterator[Judgement]:
        """Confirmed if the worst seed of one is above the best of the other; with slack, if the means are so close."""
        high, low = robust(*better), robust(*worse)
        if min(len(high), len(low)) == len(SEEDS):
            text = f"robust {spread(high)} {': '.join(better)}; {spread(low)} {': '.join(worse)}"
            if slack:
                yield claim, verdict_of([statistics.fmean(high) > statistics.fmean(low) - slack]), text
            else:
                yield claim, _ranges(high, low), text

    for end, part in (("", "gamma"), ("-lenet", "lenet")):
        small, large = ((part, f"r={rate} gamma=0.1") for rate in (0.99, 0.5))
        yield from compare(f"subnet-gamma-high-rate{end}", small, (part, "r=0.99 gamma=1.0"))
        yield from compare(f"subnet-gamma-low-rate{end}", (part, "r=0.5 gamma=1.0"), large)
    whole, capped = (("lenet", f"r=0.9 gamma={name}") for name in ("0.1", "0.1 cap=0.5"))
    yield from compare("subnet-gamma-middle-rate-lenet", ("lenet", "r=0.9 gamma=1.0"), whole)
    yield from compare("subnet-whole-layers-hurt-lenet", capped, whole)
    yield from _judge_norm(rows["norm"])
    yield from _judge_norm(rows["norm-cnn"], "-cnn")
    popup = ("gamma", "r=0.99 gamma=0.1")
    yield from compare("subnet-binary-weights", popup, ("weights", "kaiming LBN"), slack=0.05)
    yield from compare("subnet-cached-one-step", ("fast", "cached 28x28"), popup, slack=0.05)
    yield from compare("subnet-cached-low-resolution", ("fast", "cached 14x14"), ("fast", "cached 28x28"), slack=0.05)
    binary = "binary sub-network, gamma 0.1"
    for end, part in (("", "table"), ("-0-2", "table-0.2")):
        yield from compare(f"subnet-better-than-rst{end}", (part, binary), (part, "RST, gamma 1"))
        yield from compare(f"subnet-against-hydra{end}", (part, binary), (part, "HYDRA, gamma 0.1"))
        same = (part, "AT, dense, same size in bits")
        yield from compare(f"subnet-against-small-dense{end}", (part, binary), same)
        signs = (part, "BinaryConnect, dense, same size in bits")
        yield from compare(f"subnet-against-small-binary{end}", (part, binary), signs)
        yield from compare(f"subnet-against-dense{end}", (part, binary), (part, "AT, dense"))
        yield from compare(f"subnet-against-binary-connect{end}", (part, binary), (part, "BinaryConnect, dense"))
        yield from compare(f"subnet-adaptive-rates{end}", (part, binary), (part, "binary sub-network, gamma 1"))
        yield from compare(f"subnet-norm-helps-rst{end}", (part, "RST, gamma 1"), (part, "RST, gamma 1, no LBN"))


def _ranges(high: list[float], low: list[float]) -> str:
    """Whether all seeds of one are above all seeds of the other, below them, or neither."""
    if min(high) > max(low):
        return "confirmed"
    return "refuted" if max(high) < min(low) else "not decided at this size"


def _judge_norm(rows: dict[str, list[dict[str, Any]]], end: str = "") -> Iterator[Judgement]:
    scales = (0.001, 0.1, 1.0)
    groups = {n: [[run["robust"] for run in rows.get(f"{n} a={a}", ())] for a in scales] for n in ("LBN", "no LBN")}
    if any(len(group) != len(SEEDS) for side in groups.values() for group in side):
        return
    text = "; ".join(f"{name}: {', '.join(map(spread, side))}" for name, side in groups.items())
    pairs = zip(groups["LBN"], groups["no LBN"], strict=True)
    yield f"subnet-last-batch-norm{end}", verdict_of([min(a) > max(b) for a, b in pairs]), text
    means = {name: [statistics.fmean(group) for group in side] for name, side in groups.items()}
    change = {name: max(values) - min(values) for name, values in means.items()}
    trained = max(means["no LBN"]) > 0.2  # without it there must be an effect to compare with
    flatter = [change["LBN"] < change["no LBN"]]
    yield f"subnet-score-scale{end}", verdict_of(flatter) if trained else "not decided at this size", text


def by_name(rows: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The runs of each setting over its seeds."""
    names = dict.fromkeys(key.rpartition(" seed=")[0] for key in rows)
    return {name: [row for key, row in rows.items() if key.rpartition(" seed=")[0] == name] for name in names}


def spread(values: list[float]) -> str:
    """Mean, smallest and largest, in per cent."""
    mean = statistics.fmean(values)
    return f"{100 * mean:.1f} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def to_markdown(record: dict[str, Any]) -> str:
    """The tables to read."""
    text = ["# Sub-networks", "", describe_markdown(record["run"]), ""]
    text += [
        "MLP 784-256-256-10 (lenet: the padded LeNet of width 4; norm-cnn: two convolutions and a dense layer, each",
        "before a batch norm) on 4,000 images of mnist-mini, adversarial",
        "training at linf 0.1 (table-0.2: linf 0.2), 8 epochs, PGD with 3 steps: a CPU-sized set-up that is compared",
        "with itself only. Mean over the seeds with the smallest and the largest, per cent of 500 test inputs, PGD",
        "with 20 steps; in the table of methods 200 inputs and AutoAttack.",
        "Fewer than three seeds is no finding.",
    ]
    for part in (*PARTS, *TABLES):
        if record.get(part):
            columns = ["setting", "seeds", "clean", "robust", "kept weights", "seconds of training"]
            columns += ["bytes of the file"] if part in TABLES else []
            rows = [_row(name, runs) for name, runs in by_name(record[part]).items()]
            text += ["", f"## {part}", "", markdown_table(columns, rows)]
    if record.get("bounds"):
        rows = [
            [name, ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.3g}" for k, v in row.items())]
            for name, row in record["bounds"].items()
            if isinstance(row, dict)
        ]
        text += [
            "",
            "## bounds and inference",
            "",
            "64 inputs, one thread, processor time.",
            "",
            markdown_table(["network", "measured"], rows),
        ]
    return "\n".join(text)


def _row(name: str, runs: list[dict[str, Any]]) -> list[object]:
    clean, robust = ([run[key] for run in runs] for key in ("clean", "robust"))
    row = [name, len(runs), spread(clean), spread(robust), f"{runs[0]['kept']:,}"]
    row.append(f"{statistics.fmean(run['seconds'] for run in runs):.0f}")
    return [*row, f"{runs[0]['bytes']:,}"] if "bytes" in runs[0] else row


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*PARTS, *TABLES, "bounds"])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no new run begins after so many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    until, out = time.monotonic() + arguments.seconds, arguments.out
    record = read_results("subnetworks", out)
    done = run_sweep(record, [part for part in arguments.parts if part in PARTS], until, out)
    for part in TABLES:
        done = done and (part not in arguments.parts or run_table(record, part, until, out))
    done = done and ("bounds" not in arguments.parts or run_bounds(record, until, out))
    report_claims(judge(record))
    print("all done" if done else "time is up; run the same command again to go on")


if __name__ == "__main__":
    main()

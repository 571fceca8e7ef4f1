"""`holdfast analyze`: numbers about a model or a training run that are neither an attack nor a proof of its answers."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

import holdfast as hf
from holdfast.analyze.flops import layer_flops, saved
from holdfast.analyze.lipschitz_lower import global_lower_bound, local_lower_bound, tightness_ratio
from holdfast.analyze.pac_bayes import pac_bayes_of, robust_gap
from holdfast.analyze.products import cost_of_methods
from holdfast.analyze.subnetworks import (
    LayerPattern,
    alignment,
    channel_plot,
    consecutive,
    layer_patterns,
    mask_picture,
)
from holdfast.analyze.tightness import tightness, tightness_table
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.cli.analyze_volume import volume
from holdfast.cli.common import (
    AS_IT_IS,
    DataOption,
    InputsOption,
    ModelArgument,
    Opening,
    RootOption,
    SeedOption,
    ThreatOption,
    check_table,
    open_both,
    opens_model,
)
from holdfast.cli.difficulty import difficulty_command, subsets_command
from holdfast.cli.draws import draws, proxy
from holdfast.cli.figures import ReportOption, show
from holdfast.cli.landscape import landscape
from holdfast.data.draw import sample
from holdfast.errors import InputError
from holdfast.runs.certify_run import Row
from holdfast.threats import L2
from holdfast.utils.files import write_bytes, write_text
from holdfast.utils.png import encode_png

app = typer.Typer(
    add_completion=False,
    help="Analyze a model or a training run: generalisation, smoothness, difficulty, landscape and more.",
    no_args_is_help=True,
)
app.command()(landscape)
app.command("difficulty")(difficulty_command)
app.command("subsets")(subsets_command)
app.command("volume")(volume)
app.command("draws")(draws)
app.command("proxy")(proxy)


@app.command("pac-bayes")
@opens_model
def pac_bayes(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    n: Annotated[
        int, typer.Option("--n", "-n", min=1, help="Number of training inputs, drawn with the classes balanced.")
    ] = 1000,
    network: Annotated[str, typer.Option(help="Weights that are random: top (the last layer) or full (all).")] = "top",
    mode: Annotated[str, typer.Option(help="What the Hessian counts as: first-order, spherical or log.")] = (
        "first-order"
    ),
    beta: Annotated[float | None, typer.Option(help="Factor of the bound; the number of inputs if not given.")] = None,
    sigma0_sq: Annotated[float | None, typer.Option(help="Variance of the prior; 1 / features if not given.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of PGD.")] = 10,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Show the PAC-Bayes objective of a model, term by term, and the gap from training data to test data under PGD.

    The objective ranks models; it is no bound of the error.
    """
    check_table(out)
    limit = hf.threat(threat)
    net, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, split="train", seed=seed)
    how: dict[str, Any] = {"beta": beta, "sigma0_sq": sigma0_sq, "steps": steps, "seed": seed}
    found = pac_bayes_of(net, taken.x, taken.y, limit, network=cast(Any, network), mode=cast(Any, mode), **how)
    named = (("risk", found.risk), ("norm term", found.norm_term), ("curvature term", found.curvature_term))
    numbers = [*named, ("objective", found.value), ("beta", found.beta), ("sigma0_sq", found.sigma0_sq)]
    if dataset.whole is None:
        test = sample(dataset, n, seed=seed)
        gap = robust_gap(net, (taken.x, taken.y), (test.x, test.y), limit, steps=steps, seed=seed)
        numbers += [("accuracy on training data", gap.train), ("accuracy on test data", gap.test), ("gap", gap.gap)]
    show(["figure", "value"], [{"figure": name, "value": float(value)} for name, value in numbers], out)
    typer.echo(f"{limit} by PGD; training inputs: {taken.drawn}; the objective is no bound of the error")
    if dataset.whole is not None:
        typer.echo(f"no gap: '{dataset.name}' has no folders train/ and test/, so nobody knows what was trained on")


@app.command()
@opens_model
def lipschitz(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: Annotated[
        str | None, typer.Option(help="Also look for pairs inside a ball around each input, such as l2:0.5.")
    ] = None,
    n: InputsOption = 50,
    steps: Annotated[int, typer.Option(min=0, help="Steps of the search for steep pairs of inputs.")] = 500,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Bound the l2 Lipschitz constants of the margins from above, by proof, and from below, by pairs of inputs."""
    check_table(out)
    ball = None if threat is None else hf.threat(threat)
    if ball is not None and not isinstance(ball, L2):
        raise InputError(f"--threat must be an l2 ball, such as l2:0.5, got '{ball}'")
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    upper = lipschitz_bound(trace(network, taken.x[:1]))
    lower = global_lower_bound(network, taken.x, taken.x.roll(1, 0), steps=steps)
    pairs = upper.pairs
    first, second = divmod(int(pairs.argmax()), len(pairs))
    worst = f"{dataset.classes[first]} and {dataset.classes[second]}"
    rows: list[Row] = [{"constant": f"layer {name}, at most", "value": float(value)} for name, value in upper.layers]
    rows.append({"constant": "features, at most", "value": float(upper.body)})
    rows.append({"constant": f"margin of {worst}, at most", "value": float(pairs.max())})
    if ball is not None:
        local = local_lower_bound(network, taken.x, ball, steps=steps, seed=seed)
        rows.append({"constant": f"some margin within {ball}, at least", "value": float(local.value.max())})
        lower = max(lower, local, key=lambda found: float(found.value.max()))
    rows.append({"constant": "some margin, at least", "value": float(lower.value.max())})
    rows.append({"constant": "tightness: at least / at most", "value": tightness_ratio(lower, upper)})
    show(["constant", "value"], rows, out)
    typer.echo(f"pairs began at inputs: {taken.drawn}; {steps} steps")


@app.command("tightness")
@opens_model
def tightness_command(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    n: InputsOption = 100,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Compare how tight several relaxations are on one model: the sum of the bounds and the loss they give."""
    check_table(out)
    limit = hf.threat(threat)
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    found = tightness(network, taken.x, taken.y, limit, seed=seed)
    rows = cast("list[Row]", tightness_table(found))
    show(list(rows[0]), rows, out)
    typer.echo(f"at {limit}; inputs: {taken.drawn}; lower is tighter")


@app.command()
@opens_model
def cost(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    threat: ThreatOption = "linf:0.1",
    n: InputsOption = 10,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Count what a step of PGD and each kind of bound cost on one input, in multiplications."""
    check_table(out)
    limit = hf.threat(threat)
    network, dataset = open_both(model, data, opening, root)
    taken = sample(dataset, n, seed=seed)
    found = cost_of_methods(network, taken.x, taken.y, limit)
    rows: list[Row] = [
        {"method": name, "multiplications": count, "passes forward": count / found["forward"]}
        for name, count in found.items()
    ]
    show(["method", "multiplications", "passes forward"], rows, out)
    typer.echo(f"at {limit}; inputs: {taken.drawn}; matrix products and convolutions, counted as they are run")


@app.command()
@opens_model
def subnetwork(
    model: ModelArgument,
    data: DataOption = "mnist-mini",
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for pictures of every mask and of the weights per channel.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Random masks in each picture.")] = 500,
    out: ReportOption = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Show the pattern of a pruned network: empty channels beside random masks, agreement of layers, operations."""
    check_table(out)
    network, dataset = open_both(model, data, opening, root)
    found = layer_patterns(network)
    feeds = {second: _agreement(found[first], found[second]) for first, second in consecutive(network)}
    rows: list[Row] = [
        {
            "layer": name,
            "weights": p.mask.numel(),
            "kept": int(p.mask.sum()),
            "empty outputs": f"{p.empty_outputs:.1%}",
            "by chance": f"{p.random_outputs:.1%}",
            "empty inputs": f"{p.empty_inputs:.1%}",
            "by chance ": f"{p.random_inputs:.1%}",
            "agrees with the layer before": feeds.get(name, ""),
        }
        for name, p in found.items()
    ]
    show(list(rows[0]), rows, out)
    less = saved(layer_flops(network, dataset.test.x.shape[1:]))
    typer.echo(
        f"operations that binary weights save at this mask: {less.forward_evaluation:.1%} of a pass forward, "
        f"{less.forward_training:.1%} in training, {less.backward:.1%} of a pass backward (counted, not timed)"
    )
    if pictures is not None:
        for name, p in found.items():
            if p.mask.ndim in (2, 4):
                write_bytes(pictures / f"mask-{name}.png", encode_png(mask_picture(p.mask).cpu().numpy()))
                write_text(pictures / f"channels-{name}.svg", str(channel_plot(p, draws=draws, seed=seed)))
        typer.echo(f"pictures: {pictures}")


def _agreement(first: LayerPattern, second: LayerPattern) -> str:
    """Jaccard index of the empty channels between two layers; none where no channel is empty."""
    empty = first.empty_outputs > 0 or second.empty_inputs > 0
    return f"{alignment(first, second):.2f}" if empty else "no empty channel"

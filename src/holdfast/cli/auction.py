"""`holdfast auction`: learn an auction, prove how little a bidder gains by lying, write a page about it."""

import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor

from holdfast.apps.auctions import (
    AuctionNet,
    best_misreports,
    certify_regret,
    draw_values,
    load_auction,
    load_auction_recipe,
    train_auction,
)
from holdfast.apps.auctions.auction_page import auction_page
from holdfast.apps.auctions.auction_recipe import list_auctions
from holdfast.apps.auctions.mechanism import FRESH
from holdfast.apps.auctions.regret import Regret
from holdfast.apps.auctions.regret_milp import milp_regret
from holdfast.apps.auctions.statements import Statement, describe_auction
from holdfast.apps.auctions.training import MODEL, was_trained_on
from holdfast.apps.auctions.values import read_values
from holdfast.cli.common import SeedOption, parse_option, run_folder
from holdfast.errors import InputError
from holdfast.utils.files import write_json, write_text

app = typer.Typer(
    add_completion=False, help="Auctions that are learned, and proved nearly strategyproof.", no_args_is_help=True
)
RunArgument = Annotated[Path, typer.Argument(help="Folder of `auction train`, or its model.safetensors.")]
InputsOption = Annotated[int, typer.Option("--n", "-n", min=1, help="Profiles of values.")]
ValuesOption = Annotated[
    Path | None, typer.Option("--values", help="CSV of values, one profile a row; uniform ones if not given.")
]
ToleranceOption = Annotated[float, typer.Option(help="Stop at upper ends this close to the best lie.")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds for all profiles together; 0 for no limit.")]
AscentOption = Annotated[
    int, typer.Option(min=0, help="Steps of gradient ascent for the empirical regret beside the proof; 0 for none.")
]


@app.command("train")
def train_command(
    recipe: Annotated[str, typer.Argument(help=f"Recipe ({', '.join(list_auctions())}) or a TOML file.")],
    change: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: iterations=500.")] = None,
    values: ValuesOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Train an auction that earns much and leaves little to gain by lying."""
    changes = dict(parse_option(text) for text in change or [])
    chosen = load_auction_recipe(recipe, **changes)
    own = None if values is None else read_values(values, chosen.bidders, chosen.items)
    folder = out or run_folder(Path(recipe).stem)
    result = train_auction(chosen, values=own, out=folder, resume=resume, show=not quiet)
    last = result.history[-1]
    typer.echo(f"revenue {last['revenue']:.4f}, regret found in training {last['regret']:.5f}")
    following = shlex.join(["holdfast", "auction", "certify", str(folder)])
    typer.echo(f"model: {folder / MODEL}\nnext: {following}")


@app.command("certify")
def certify_command(
    run: RunArgument,
    n: InputsOption = 100,
    values: ValuesOption = None,
    tolerance: ToleranceOption = 1e-3,
    timeout: TimeoutOption = 0.0,
    ascent: AscentOption = 1000,
    exact: Annotated[bool, typer.Option("--exact", help="Mixed-integer programs, for direct payments.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file; beside the model if not given.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Prove for every profile and bidder how much a lie can gain."""
    mechanism, profiles, regret, statement, fresh = _certified(
        run, n, values, tolerance, timeout, ascent, seed, exact=exact
    )
    path = out or _folder(run) / "regret.json"
    method = "mixed-integer programs, up to the tolerances of the solver" if exact else "branch and bound"
    stated = to_json(mechanism, profiles, regret, statement, seed=None if values else seed)
    write_json(path, {"method": method, "fresh": fresh, **stated})
    typer.echo(
        f"revenue {statement.revenue:.4f}; mean regret between {statement.found:.5f} and {statement.proved:.5f}, "
        f"largest at most {statement.largest:.5f} ({statement.profiles} profiles, {statement.seconds:.2f} CPU s each)"
    )
    if statement.empirical is not None:
        typer.echo(f"gradient ascent gains {statement.empirical:.5f} on average")
    if statement.violations:
        typer.echo(
            f"{statement.violations:.1%} of the bidders pay more than what they get is worth, at most "
            f"{statement.violation_largest:.5f} too much; without these payments revenue {statement.revenue_kept:.4f}"
        )
    if fresh:
        typer.echo(
            f"expected regret at most {statement.mean_above:.4f} by Hoeffding's bound, {statement.bernstein_above:.4f} "
            f"by Bernstein's, each with confidence {statement.confidence:.0%}"
        )
    else:
        typer.echo("the auction was trained on these values: they say nothing about others")
    typer.echo(f"details: {path}")


@app.command("report")
def report_command(
    run: RunArgument,
    n: InputsOption = 100,
    values: ValuesOption = None,
    tolerance: ToleranceOption = 1e-3,
    timeout: TimeoutOption = 0.0,
    ascent: AscentOption = 1000,
    out: Annotated[Path | None, typer.Option(help="HTML file; beside the model if not given.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Write one page: what the auction does, what lying gains at most, and what classical mechanisms earn."""
    mechanism, profiles, regret, statement, fresh = _certified(run, n, values, tolerance, timeout, ascent, seed)
    path = out or _folder(run) / "report.html"
    title = f"Auction of {mechanism.items} items to {mechanism.bidders} bidder{'s' * (mechanism.bidders > 1)}"
    write_text(path, auction_page(mechanism, profiles, regret, statement, title=title, fresh=fresh))
    typer.echo(f"report: {path}")


def _folder(run: Path) -> Path:
    return run if run.is_dir() else run.parent


def _certified(
    run: Path,
    n: int,
    values: Path | None,
    tolerance: float,
    timeout: float,
    ascent: int,
    seed: int,
    *,
    exact: bool = False,
) -> tuple[AuctionNet, Tensor, Regret, Statement, bool]:
    """The auction, the profiles, what is proved and said of them, and whether the training did not see them."""
    if tolerance <= 0 or timeout < 0:
        raise InputError(f"--tolerance must be > 0 and --timeout >= 0, got {tolerance:g} and {timeout:g}")
    mechanism = load_auction(run)
    sizes = mechanism.bidders, mechanism.items
    if values is None:
        profiles, fresh = draw_values(n, *sizes, support=mechanism.support, seed=FRESH + seed), True
    else:
        own = read_values(values, *sizes)
        profiles, fresh = own[:n], not was_trained_on(_folder(run), own)
    if exact:
        regret = milp_regret(mechanism, profiles, timeout=timeout / (len(profiles) * mechanism.bidders) or 60.0)
    else:
        regret = certify_regret(mechanism, profiles, tolerance=tolerance, timeout=timeout or math.inf)
    gains = best_misreports(mechanism, profiles, steps=ascent)[1] if ascent else None
    said = describe_auction(mechanism, profiles, regret, tolerance=tolerance, gains=gains)
    return mechanism, profiles, regret, said, fresh


def to_json(
    mechanism: AuctionNet, values: Tensor, regret: Regret, statement: Statement, *, seed: int | None
) -> dict[str, Any]:
    """All that the certificate claims: over which set, with which confidence, per profile and in all.

    Args:
        mechanism: the auction.  values, regret, statement: what was certified.
        seed: of the profiles; None if they are the user's own.
    """
    support = [mechanism.support.low, mechanism.support.high]
    return {
        "claim": "no bidder gains more than `proved` by any bid in the support while all others bid their values",
        "threat_set": {"bids": support, "closed": True, "bidders": mechanism.bidders, "items": mechanism.items},
        "confidence": {"per_profile": 1.0, "distribution": statement.confidence, "family_wise": False},
        "samples": statement.profiles,
        "seed": seed,
        "gap": float((regret.proved - regret.found).max()),
        "summary": {
            **statement.to_json(),
            "found_by_bidder": regret.found.mean(0).tolist(),
            "proved_by_bidder": regret.proved.mean(0).tolist(),
        },
        "profiles": [
            {"values": v, "found": f, "proved": p, "best_bids": b}
            for v, f, p, b in zip(
                values.tolist(), regret.found.tolist(), regret.proved.tolist(), regret.bids.tolist(), strict=True
            )
        ],
    }

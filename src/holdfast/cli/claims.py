"""`holdfast claims`: what the literature says, and what came out when it was tried here."""

from typing import Annotated

import typer
from rich.console import Console

from holdfast.cli.common import table
from holdfast.errors import InputError
from holdfast.runs.claims import FILE, Claim, find_claim, load_claims, repository, run_claim

app = typer.Typer(
    add_completion=False,
    help="Claims of the literature that were checked here: list them with verdicts, show one, run one again.",
    invoke_without_command=True,
)
console = Console()
Name = Annotated[str, typer.Argument(metavar="ID", help="The name of a claim, as the list shows it.")]


@app.callback()
def listing(
    ctx: typer.Context,
    verdict: Annotated[str, typer.Option(help="Only claims whose verdict begins with this text.")] = "",
    source: Annotated[str, typer.Option(help="Only claims whose source contains this text.")] = "",
) -> None:
    """List all claims with their verdicts."""
    if ctx.invoked_subcommand is not None:
        return
    claims = [
        claim for claim in load_claims() if claim.verdict.startswith(verdict) and source.lower() in claim.source.lower()
    ]
    if not claims:
        raise InputError("no claim fits; `holdfast claims` lists all of them")
    rows = [[c.id, c.verdict, str(c.seeds or "-"), f"{c.minutes:g}", c.statement] for c in claims]
    console.print(table(["name", "verdict", "seeds", "CPU min", "claim"], rows))
    console.print(
        f"{len(claims)} claims; `holdfast claims show ID` has the result, `holdfast claims run ID` repeats it"
    )


@app.command()
def show(name: Name) -> None:
    """Show a claim in full."""
    claim = find_claim(load_claims(), name)
    for key in Claim.__dataclass_fields__:
        value = getattr(claim, key)
        if value:
            console.print(f"[bold]{key}[/bold]: ", end="")
            console.print(str(value), markup=False, highlight=False)


@app.command()
def run(
    name: Name,
    small: Annotated[bool, typer.Option("--small", help="The short version of the run, where there is one.")] = False,
) -> None:
    """Repeat a claim and compare the verdict with the recorded one; exit code 1 if they differ."""
    root = repository()
    if root is None:
        raise InputError(f"claims are run in a copy of the repository: change to a folder that holds {FILE}")
    claim = find_claim(load_claims(), name)
    if not small:
        typer.echo(f"{_time(claim)}; a run that is stopped goes on where it was")
    found = run_claim(claim, root, small=small)
    same = found == claim.verdict
    typer.echo(f"{name}: {found} now, {claim.verdict} as recorded" + (f" on {claim.date}" if claim.date else ""))
    if not same:
        raise typer.Exit(1)


def _time(claim: Claim) -> str:
    """How long the command takes."""
    return (
        f"this takes about {claim.minutes:g} CPU minutes" if claim.minutes else "how long this takes was not recorded"
    )

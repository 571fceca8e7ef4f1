"""The command line: thin commands on top of the Python functions of the same names, one file for each.

A command is imported when it is called: `holdfast --help` and completion must not wait for torch.
"""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer

from holdfast.errors import HoldfastError, Interrupted, on_command_line

COMMANDS = {
    "audit": "Bracket the robust accuracy of a model between what attacks break and what proofs guarantee.",
    "report": "Write one page that compares several audits.",
    "attack": "Find an adversarial example of each input, within a threat or as near as possible, and save it.",
    "certify": "Prove for each input that no perturbation of the threat changes its class.",
    "radius": "Find the largest radius around each input in which its class is proved not to change.",
    "nearest": "Find the adversarial example that is nearest to each input, and save it with its distance.",
    "detect": "Certify an object detector: what it finds in an image, and in every image within a radius.",
    "verify": "Decide a property of a network: unsat (it holds), sat (with a counter-example), timeout or unknown.",
    "bounds": "Show the range of each logit of one input under the threat.",
    "explain": "Which features decide an answer.",
    "analyze": "Analyze a model or a training run: generalisation, smoothness, difficulty, landscape and more.",
    "train": "Train a model with a recipe.",
    "compress": "Write a pruned or binary network to a compact file: places and signs of the weights, bit for bit.",
    "compare": "Compare finished trainings: clean and robust accuracy, time, memory, overfitting.",
    "watermark": "Watermarks in the weights, with a certificate.",
    "auction": "Auctions that are learned, and proved nearly strategyproof.",
    "claims": "Claims of the literature that were checked here: list them with verdicts, show one, run one again.",
    "serve": "Show all runs in the browser, live, and try inputs on a model; stop with Ctrl-C.",
    "methods": "List the methods: what each does, what it guarantees, for which threats.",
    "models": "List the architectures that `make_model` and recipes know.",
    "data": "Data sets: what there is, and how to get it.",
}
"""Each command is the Typer application `app` of the file of its name; a test compares these lines with its help."""


def load(name: str) -> Any:
    """The command of that name, imported."""
    command = typer.main.get_command(import_module(f"holdfast.cli.{name}").app)
    command.name = name
    return command


OTHER_WORDS = {"method": "certify"}
"""Options that go by another name in some commands: an audit has no --method, but --certify."""


def options_of(command: Any) -> dict[str, str]:
    """The options of a command, or of the commands of a group: name in Python and long form, such as `--arch-args`."""
    parts = getattr(command, "commands", {"": command}).values()
    pairs = [(p.name, [text for text in p.opts if text.startswith("--")]) for part in parts for p in part.params]
    return {name: texts[0] for name, texts in pairs if texts}


class LazyGroup(typer.core.TyperGroup):
    """Commands that are imported when they are called, not when they are listed."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; what it says about arguments names its own options."""

        def spell(name: str) -> str:
            known = options_of(self.commands.get(ctx.invoked_subcommand))
            words = (name, OTHER_WORDS.get(name, ""))
            return next((known[word] for word in words if word in known), f"--{name.replace('_', '-')}")

        with on_command_line(spell):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Put the command itself in the place of its line of help."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="holdfast",
    cls=LazyGroup,
    help="How far can an adversary push a neural network before it breaks, and what can be proved about it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"holdfast {version('holdfast')}")
        raise typer.Exit


@app.callback()
def options(
    shown: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """How far can an adversary push a neural network before it breaks, and what can be proved about it?"""


def _line_of_help() -> None:
    raise HoldfastError("a command was called before it was imported: a bug in Holdfast, please report it")


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_line_of_help)


def main() -> None:
    """Entry point: an error of our own becomes one line and exit code 2, never a traceback."""
    try:
        app()
    except Interrupted as error:
        typer.echo(str(error), err=True)
        sys.exit(130)
    except (HoldfastError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)

"""How an auction is trained: a TOML file, checked on load."""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdfast.apps.auctions.auction_net import AuctionNet, Payment, RegretNet
from holdfast.apps.auctions.mechanism import UNIT, Support, check_sizes
from holdfast.apps.auctions.objective import Objective
from holdfast.errors import InputError, did_you_mean
from holdfast.utils.options import Count, Positive, Whole, build

SHIPPED = Path(__file__).with_name("shipped")


@dataclass(frozen=True)
class AuctionRecipe:
    """A whole training run of a mechanism.

    Attributes:
        bidders: n.  items: k.
        hidden: widths of the trunk's layers.
        head: "sparsemax" can be certified, "softmax" is the original network.
        payment: "share" is rational by architecture; "direct" learns it.
        iterations: batches.  batch_size: profiles in each.
        lr: largest learning rate of Adam, which rises over the first tenth and falls to zero.
        teacher: iterations of a softmax teacher that is trained first; 0 for none.
        support: interval of the values.
        objective: terms of the loss.
        seed: fixes every random choice.
    """

    bidders: Count = 1
    items: Count = 2
    hidden: tuple[Count, ...] = (128, 128)
    head: Literal["sparsemax", "softmax"] = "sparsemax"
    payment: Payment = "share"
    iterations: Count = 2000
    batch_size: Count = 512
    lr: Positive = 3e-3
    teacher: Whole = 0
    support: Support = UNIT
    objective: Objective = field(default_factory=Objective)
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(self.bidders, self.items)
        if self.head == "softmax" and self.payment == "direct":
            raise InputError("a network with a softmax head pays a share of its bids: use payment = 'share'")

    def network(self) -> AuctionNet:
        """A new mechanism; its weights come from torch's generator."""
        if self.head == "softmax":
            return RegretNet(self.bidders, self.items, hidden=self.hidden, support=self.support)
        return AuctionNet(self.bidders, self.items, hidden=self.hidden, payment=self.payment, support=self.support)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a TOML or JSON file."""
        table = asdict(self)
        return {**table, "hidden": list(self.hidden)}


def list_auctions() -> list[str]:
    """Names of the recipes that come with Holdfast."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_auction_recipe(source: str | Path | Mapping[str, Any], **overrides: Any) -> AuctionRecipe:
    """A recipe by name, from a TOML file or from a table; overrides of [objective] are written objective.steps=...

    >>> load_auction_recipe("auction-1x2", iterations=10).iterations
    10
    """
    table = dict(source) if isinstance(source, Mapping) else _read(str(source))
    for name, value in overrides.items():
        section, _, key = name.replace("__", ".").partition(".")
        if key:
            table[section] = {**table.get(section, {}), key: value}
        else:
            table[section] = value
    return build(AuctionRecipe, table, "recipe")


def _read(source: str) -> dict[str, Any]:
    path = SHIPPED / f"{source}.toml" if source in list_auctions() else Path(source)
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no recipe '{source}'. " + did_you_mean(source, list_auctions())) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"cannot read the recipe '{source}': {error}") from error

"""Learn an auction of two items to one bidder, and prove how little the bidder can gain by lying."""

from holdfast.apps.auctions import (
    FRESH,
    best_misreports,
    certify_regret,
    draw_values,
    load_auction_recipe,
    manelli_vincent,
    train_auction,
)
from holdfast.apps.auctions.statements import describe_auction


def main(*, iterations: int = 300, width: int = 64, profiles: int = 30) -> None:
    """Train, search for lies, prove that there are no better ones, and compare with the best classical auction."""
    recipe = load_auction_recipe("auction-1x2", iterations=iterations, hidden=[width, width])
    auction = train_auction(recipe).model
    values = draw_values(profiles, 1, 2, seed=FRESH)  # the training has not seen them
    _, gains = best_misreports(auction, values, steps=200)  # an attack: what a liar gains at least
    regret = certify_regret(auction, values, tolerance=2e-3)  # a proof: what any liar gains at most
    said = describe_auction(auction, values, regret, tolerance=2e-3, gains=gains)
    print(f"revenue {said.revenue:.3f}; without any regret {manelli_vincent()(values).payment.mean():.3f} is optimal")
    print(f"mean regret: {said.empirical:.4f} by ascent, between {said.found:.4f} and {said.proved:.4f} by proof")
    print(f"no bidder of these {said.profiles} profiles gains more than {said.largest:.4f} by any lie")


if __name__ == "__main__":
    main()

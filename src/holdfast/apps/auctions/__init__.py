"""Auctions that are learned, with a proof of how little a bidder can gain by lying."""

from holdfast.apps.auctions.auction_net import AuctionNet, RegretNet
from holdfast.apps.auctions.auction_recipe import AuctionRecipe, list_auctions, load_auction_recipe
from holdfast.apps.auctions.classical import Menu, SecondPrice, grand_bundle, manelli_vincent, myerson, vcg
from holdfast.apps.auctions.mechanism import FRESH, Mechanism, Outcome, Support, draw_values, utility, violation
from holdfast.apps.auctions.misreport import best_misreports
from holdfast.apps.auctions.regret import Regret, certify_regret
from holdfast.apps.auctions.training import AuctionResult, load_auction, save_auction, train_auction

__all__ = [
    "FRESH",
    "AuctionNet",
    "AuctionRecipe",
    "AuctionResult",
    "Mechanism",
    "Menu",
    "Outcome",
    "Regret",
    "RegretNet",
    "SecondPrice",
    "Support",
    "best_misreports",
    "certify_regret",
    "draw_values",
    "grand_bundle",
    "list_auctions",
    "load_auction",
    "load_auction_recipe",
    "manelli_vincent",
    "myerson",
    "save_auction",
    "train_auction",
    "utility",
    "vcg",
    "violation",
]

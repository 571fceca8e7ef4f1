"""A ball and a box through a network together."""

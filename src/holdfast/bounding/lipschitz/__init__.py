"""Lipschitz constants of layers and networks, proved."""

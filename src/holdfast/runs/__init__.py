"""Runs of attacks, certificates and comparisons: stored as they go, resumed after a kill."""

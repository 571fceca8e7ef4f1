"""Certificates by sampling: randomised smoothing and its relatives."""

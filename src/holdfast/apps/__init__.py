"""Guarantees put to work: object detection, watermarks in the weights."""

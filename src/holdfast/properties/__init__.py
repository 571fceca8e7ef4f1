"""What is asked of a network: regions of inputs and linear conditions on the outputs, and the answer."""

from holdfast.properties.decide import verify
from holdfast.properties.property import Case, Polytope, Property, robust
from holdfast.properties.save import save_property
from holdfast.properties.vnnlib import load_property, parse_property

__all__ = ["Case", "Polytope", "Property", "load_property", "parse_property", "robust", "save_property", "verify"]

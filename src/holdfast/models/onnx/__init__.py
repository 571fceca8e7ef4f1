"""ONNX graphs as torch modules."""

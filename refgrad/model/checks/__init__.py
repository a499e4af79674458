"""Checks that onnx does not make: attributes, arities and recursion, and the fault of a model for which a function raised."""

"""The operators of ONNX in other systems."""

"""What other systems call the operators of ONNX."""

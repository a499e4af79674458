"""Bodies, rules and forms of ONNX Runtime's operators, a file per family."""

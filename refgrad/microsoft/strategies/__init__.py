"""Strategies of ONNX Runtime's forward operators, a file per family."""

"""The models that are built on a gradient: forward mode, Hessians, the operator Gradient, and ONNX Runtime's own builder."""

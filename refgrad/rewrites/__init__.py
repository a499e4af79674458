"""Models made from a model: with a loss, with lifted weights, a part of it, two halves, in ai.onnx operators alone."""

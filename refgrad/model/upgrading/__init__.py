"""Models of older opsets, or written by a runtime, become models of an opset that the rules know."""

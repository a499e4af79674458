"""The error of gradients over the whole domain of an operator, in every float type (docs/precision.md)."""

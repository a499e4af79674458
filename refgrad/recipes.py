"""The uses of a gradient, as models: saliency maps, integrated gradients, FGSM, forces, a ranking of weights."""

from refgrad.transforms.recipes import (
    fgsm,
    forces,
    integrated_gradients,
    saliency,
    select,
    sensitivities_in,
    sensitivity,
)

__all__ = ["fgsm", "forces", "integrated_gradients", "saliency", "select", "sensitivities_in", "sensitivity"]

"""Transformations that build on a gradient: forward mode, Hessians, recipes, lowering, Gradient, losses, selection."""

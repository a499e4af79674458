"""What is built on a gradient: forward mode, Hessians, recipes, lowering, Gradient, losses, selection."""

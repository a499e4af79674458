"""The cost of a run of a model, and the gradient that keeps a memory budget, from shapes alone."""

"""The cost of a run of a model, from shapes alone."""

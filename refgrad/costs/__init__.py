"""What a run of a model costs, from shapes alone."""

"""A run watched node by node: the origins of NaN and infinities."""

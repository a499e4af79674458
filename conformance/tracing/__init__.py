"""A run watched node by node: where NaN and infinities are born."""

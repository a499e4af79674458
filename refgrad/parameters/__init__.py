"""The initializers that are parameters: their roles, the tensors that they come from, and the way back of new values."""

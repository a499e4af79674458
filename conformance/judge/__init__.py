"""The judge of gradients, the runner that asks it about every case, and the origin of NaNs."""

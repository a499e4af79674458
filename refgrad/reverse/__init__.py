"""How does a name become a gradient? Normalise, path, sweep, assemble; bodies, calls, recomputation."""

"""Find where a gradient goes wrong: which node, and the proof."""

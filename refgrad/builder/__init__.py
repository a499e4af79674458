"""The builder of nodes, and `op`, the small surface that rules see."""

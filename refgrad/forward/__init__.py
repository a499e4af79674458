"""A model before it is differentiated: its normal form, its nodes, types and shapes."""

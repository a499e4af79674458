"""What is known of a model before it is differentiated: its normal form, its nodes, types and shapes."""

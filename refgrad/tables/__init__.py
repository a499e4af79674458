"""What is known of operators: rules, schemas, primitives, kinks, verdicts."""

"""The tables of operators: rules, schemas, primitives, kinks, verdicts."""

"""Random valid graphs, and whether what refgrad makes of them is right."""

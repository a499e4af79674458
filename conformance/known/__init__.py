"""Known bugs of other systems, and differences that are a choice."""

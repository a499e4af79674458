"""Who is asked what, in which process, and what is kept of it."""

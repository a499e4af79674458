"""The problems of a case, the observations that answer them, and the systems that are asked."""

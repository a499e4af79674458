"""Models that nobody would write, through everything that reads a model: what comes back is a result or a RefgradError."""

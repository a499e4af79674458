"""Which builders, executors and oracles are asked about which cases, in which process, and how the results are kept."""

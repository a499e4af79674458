"""The choice of builders, executors, oracles and cases, the processes that run them, and the storage of the results."""

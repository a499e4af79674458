"""What was measured. `known_failures.json` is installed: exports of the suite quote it."""

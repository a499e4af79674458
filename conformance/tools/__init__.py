"""Tools built on the suite: exports, fuzzing, jets, mutants, parity with other builders, precision, coverage."""

"""Formulas that rules and lowerings share, a file per family. Nothing is registered here."""

"""Test whether the judge notices rules that are broken on purpose."""

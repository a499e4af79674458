"""Whether the judge notices rules that are broken on purpose."""

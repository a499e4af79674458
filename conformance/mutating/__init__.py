"""Does the judge notice? Rules that are broken on purpose."""

"""Derivatives of order 1 to 3 at special points, by Taylor arithmetic along curves. Nothing here knows a rule."""

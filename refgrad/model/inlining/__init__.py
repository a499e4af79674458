"""Calls of functions become nodes, except for the calls that stay."""

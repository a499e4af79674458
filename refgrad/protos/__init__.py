"""Helpers for protobufs, and readers of files that may be a stranger's."""

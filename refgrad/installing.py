"""How refgrad is installed: the one place that a release changes."""

from __future__ import annotations

SOURCE = "."  # what pip installs: "." in a checkout, "refgrad" once there is a distribution of that name


def install(extra: str) -> str:
    """The command that installs an extra of refgrad, and where to type it."""
    where = " in a checkout of refgrad" if SOURCE == "." else ""
    return f"pip install '{SOURCE}[{extra}]'{where}"

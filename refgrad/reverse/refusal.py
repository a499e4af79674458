"""The error for a model that has no derivative: the operators in the way, the reasons, and advice."""

from __future__ import annotations

from refgrad.errors import NoGradientError, choices
from refgrad.reverse.path import Path
from refgrad.reverse.reasons import UNWRITTEN


def refuse(path: Path) -> NoGradientError:
    """The error for a path with nodes that cannot be differentiated."""
    lines, ruled = [], True
    blocked = path.blocked + path.blocked_within
    for row in path.rows:
        if row.verdict not in ("none", "missing"):
            continue
        nodes = choices((n.name for n in blocked if n.name in row.nodes), limit=5)
        if row.verdict == "none":
            why = "has no derivative"
        elif row.reason == UNWRITTEN:
            why = "has no rule"
        else:
            why = "cannot be differentiated"  # it has a rule or a body, which does not cover these nodes
        ruled = ruled and why == "cannot be differentiated"
        lines.append(f"{row.operator} {why}: {row.reason} (nodes {nodes}).")
    advice = "" if ruled else ", or give a rule with refgrad.extend.rule"
    lines.append(f"They lie between the requested inputs and outputs. Choose other names for wrt or outputs{advice}.")
    return NoGradientError("\n".join(lines), tuple(node.name for node in blocked))

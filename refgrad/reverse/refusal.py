"""The error for a model that has no derivative: the operators in the way, the reasons, and advice."""

from __future__ import annotations

from refgrad.errors import NoGradientError, choices
from refgrad.reverse.path import Path
from refgrad.reverse.reasons import UNWRITTEN


def refuse(path: Path) -> NoGradientError:
    """The error for a path with nodes that cannot be differentiated."""
    lines, is_advised = [], False
    blocked = path.blocked + path.blocked_within
    for row in path.rows:
        if row.verdict not in ("none", "missing"):
            continue
        names = [n.name for n in blocked if n.name in row.nodes]
        nodes = f"node{'s' if len(names) > 1 else ''} {choices(names, limit=5)}"
        if row.verdict == "none":
            why = "has no derivative"
        elif row.reason == UNWRITTEN:
            why = "has no rule"
            is_advised = True
        else:
            why = "cannot be differentiated"  # it has a rule or a body, which does not cover these nodes
        reason = "" if row.reason == UNWRITTEN else f": {row.reason}"
        lines.append(f"{row.operator} {why}{reason} ({nodes}).")
    advice = ", or give a rule with refgrad.extend.rule" if is_advised else ""
    lie = "It lies" if len(blocked) == 1 else "They lie"
    lines.append(
        f"{lie} between the inputs and the outputs to differentiate. Choose other inputs or outputs, wrt=[...] or "
        f"outputs=[...]{advice}."
    )
    return NoGradientError("\n".join(lines), tuple(node.name for node in blocked))

"""If, Loop and Scan: the cotangents of a body, step by step from the last to the first, or of the branch that was taken."""

from refgrad.rules.control_flow.branch import If
from refgrad.rules.control_flow.loop import Loop
from refgrad.rules.control_flow.scan import ScanRule

__all__ = ["If", "Loop", "ScanRule"]

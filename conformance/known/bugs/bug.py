"""A known bug: a model that another system runs wrongly, with the right result and what proves it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto

from refgrad.model import native

REFERENCE = "onnx.reference"
ORT = "onnxruntime"
TRAINING = "onnxruntime-training"

# The releases that the known bugs are about, the oldest first; another release is not held to them.
RELEASES = {REFERENCE: ("1.23.2",), ORT: ("1.31.1", "1.32.0"), TRAINING: ("1.19.2",)}
VERSIONS = {system: releases[-1] for system, releases in RELEASES.items()}

_FAILS = ("fails", "refuses", "is not implemented", "has no kernel")  # how the fault of such a bug begins

Arrays = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class KnownBug:
    """`system` computes `model` wrongly for `feeds`, fails on it, or ends the process (`crashes`).

    `expected` are the right outputs by name. `proof` says why they are right: in the specification's words, by a function
    body, or by a number that anybody can check by hand. A gradient kernel has `forward` instead: the model that it belongs
    to, with the inputs of `model` by the same names. Float64 differences of `forward` are the proof; every input
    `<output>_grad` of `model` is a cotangent, and every output `<input>_grad` a gradient. ONNX Runtime runs a model as it is
    written, unless the fault is in its optimizer (`optimized`). `until` is the last release that has the fault; without it
    the newest one in `RELEASES` has it. If it is a dispute about the specification, `disputed` says who computes what, and
    where that is discussed: then the system does not contradict the specification, and `proof` is one side's.
    """

    system: str
    operator: str
    fault: str
    model: ModelProto
    feeds: Arrays
    expected: Arrays
    proof: str = ""
    forward: ModelProto | None = None
    crashes: bool = False
    tolerance: float = 1e-5
    optimized: bool = False
    until: str = ""
    disputed: str = ""

    def __str__(self) -> str:
        return f"{self.system}-{self.operator}-{self.fault[:40]}"

    @property
    def is_error(self) -> bool:
        """True if the system fails on the model, or ends the process; False if its result is wrong."""
        return self.crashes or self.fault.startswith(_FAILS)

    def is_in(self, release: str) -> bool:
        """True if this release, one of `RELEASES`, has the fault."""
        releases = RELEASES[self.system]
        return not self.until or releases.index(release) <= releases.index(self.until)

    def wrong(self, results: Arrays) -> bool:
        """True if these outputs are not the expected ones."""
        return not all(equal(results[name], value, self.tolerance) for name, value in self.expected.items())


def equal(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """True if shapes and types are the same, and floats as near as `tolerance`, relative to the largest."""
    if isinstance(expected, list):
        return len(got) == len(expected) and all(equal(g, e, tolerance) for g, e in zip(got, expected, strict=True))
    if expected is None:
        return got is None
    got, expected = np.asarray(got), np.asarray(expected)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if expected.dtype.kind in "biuOUS":
        return bool((got == expected).all())
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    scale = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
    return bool(np.allclose(got, expected, tolerance, tolerance * scale, True))


def run_reference(bug: KnownBug) -> Arrays:
    """Run the model on `onnx.reference`."""
    names = [value.name for value in bug.model.graph.output]
    return dict(zip(names, native.reference(bug.model).run(None, dict(bug.feeds)), strict=True))


def run_onnxruntime(bug: KnownBug) -> Arrays:
    """Run the model on the ONNX Runtime that is installed, without optimizations unless the known bug is about them."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if bug.optimized else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(bug.model.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = copy.deepcopy(dict(bug.feeds))  # some kernels write into what they are fed
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


RUN: Mapping[str, Callable[[KnownBug], Arrays]] = {
    REFERENCE: run_reference,
    ORT: run_onnxruntime,
    TRAINING: run_onnxruntime,
}


@cache
def installed() -> Mapping[str, str]:
    """The version of each system that can be run here."""
    versions = {REFERENCE: onnx.__version__}
    try:
        import onnxruntime
    except ImportError:
        return versions
    trains = hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder")
    return versions | {TRAINING if trains else ORT: onnxruntime.__version__}

"""Take a model that is fuzzed through everything that refgrad does with one."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.numpy.kernels.control_flow import bounded_loops
from refgrad.conformance.locating.comparing import compare
from refgrad.errors import RefgradError
from refgrad.model.checks.malformed import fault_of, not_text, refusal_of
from refgrad.planning.program import ANY
from refgrad.training.step import step_model

_MOST = 4096  # elements of a feed
_ROUNDS = 100  # of a loop
_LIMIT = 64 << 20  # bytes of a run
_ROOT = "refgrad"
_ABSENT = "should be stored in"  # says onnx's checker of external data, which a model in memory has nowhere
_KEEP = ("lower", "expand", "lift", "select")


@dataclass(frozen=True)
class JourneyFault:
    """A fault of a step: `kind` is the class of an exception or a word like "invalid result", `place` its innermost line."""

    step: str
    kind: str
    place: str
    message: str


@dataclass(frozen=True)
class Journey:
    """The outcome for a model: whether it got a gradient, the faults, the time in seconds, and the largest size in bytes."""

    differentiated: bool = False
    faults: tuple[JourneyFault, ...] = ()
    seconds: float = 0.0
    slowest: str = ""
    peak: int = 0
    largest: str = ""

    def joined(self, parts: Iterable[Journey]) -> Journey:
        """The journey, with what journeys of single steps compared."""
        return self


def _feeds(model: ModelProto) -> dict[str, np.ndarray] | None:
    """A feed of ones for each input, or None where one is too large or has no array."""
    feeds = {}
    inner = {t.name for t in model.graph.initializer}
    for value in model.graph.input:
        if value.name in inner:
            continue
        tensor = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else 2 for dim in tensor.shape.dim]
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            if min(shape, default=0) < 0 or np.prod(shape, dtype=float) > _MOST:
                return None
            feeds[value.name] = np.ones(shape, dtype)
        except (KeyError, ValueError, TypeError):
            return None
    return feeds


def _fed(act: Callable[[ModelProto, dict[str, np.ndarray]], Any]) -> Callable[[ModelProto], Any]:
    """`act` on a model and feeds."""

    def step(model: ModelProto) -> Any:
        feeds = _feeds(model)
        if feeds is None:
            return None
        with bounded_loops(_ROUNDS):  # an endless loop is no fault of the interpreter
            return act(model, feeds)

    return step


def _compare(model: ModelProto, feeds: dict[str, np.ndarray]) -> None:
    compare(model, "refgrad@numpy", "refgrad@numpy:float64", feeds, search=False)


STEPS: dict[str, Callable[[ModelProto], Any]] = {
    "preflight": refgrad.preflight,
    "gradient": refgrad.gradient,
    "gradient ort": lambda model: refgrad.gradient(model, dialect="ort"),
    "jvp": refgrad.jvp,
    "hvp": refgrad.hvp,
    "run": _fed(lambda model, feeds: get_backend("numpy").prepare(model).run(feeds)),
    "run within a limit": _fed(lambda model, feeds: get_backend("numpy").prepare(model, max_memory=_LIMIT).run(feeds)),
    "lower": refgrad.lower,
    "expand": refgrad.expand_gradients,
    "text": refgrad.onnx_simple_text_plot,
    "dot": refgrad.to_dot,
    "svg": refgrad.to_svg,
    "cost": lambda model: refgrad.cost(model, {ANY: 2}),
    "cost on onnxruntime": lambda model: refgrad.cost(model, {ANY: 2}, runtime="onnxruntime"),
    "split": refgrad.split,
    "jacobian": refgrad.jacobian,
    "hessian": refgrad.hessian,
    "weights": refgrad.weights,
    "lift": refgrad.lift_weights,
    "select": refgrad.select_model_inputs_outputs,
    "loss": refgrad.add_loss_output,
    "step model": step_model,
    "walk": _fed(lambda model, feeds: refgrad.walk(model, feeds)),
    "compare": _fed(_compare),
}
TURNS = tuple(STEPS)[::2], tuple(STEPS)[1::2]  # a mutant goes through half of them


def journey(written: bytes, steps: tuple[str, ...] = tuple(STEPS)) -> Journey:
    """Take a model through `steps`."""
    warnings.simplefilter("ignore")
    try:
        model = ModelProto.FromString(written)
    except (DecodeError, UnicodeDecodeError):
        return Journey()  # whoever reads a file is told so; `read` is the one that does
    before = model.SerializePartialToString()
    faults, differentiated = [], False
    clock = Clock()
    for step in steps:
        made, fault = _step(step, model)
        clock.lap(step)
        differentiated |= step == "gradient" and made is not None
        # A model that is lowered or expanded may have nothing to change: then it is as valid as it was.
        judged = isinstance(made, ModelProto) and step != "gradient ort"
        faulty = refusal_of if not_text(model) else fault_of  # metadata that nobody reads are passed on as they are
        if judged and (why := faulty(made)) and _ABSENT not in why and not (step in _KEEP and fault_of(model)):
            fault = JourneyFault(step, "invalid result", "", why[:200])
        if fault is not None:
            faults.append(fault)
        if model.SerializePartialToString() != before:
            faults.append(JourneyFault(step, "changed model", "", ""))
            model = ModelProto.FromString(written)
    return Journey(differentiated, tuple(faults), clock.seconds, clock.slowest, clock.peak, clock.largest)


def _step(step: str, model: ModelProto) -> tuple[Any, JourneyFault | None]:
    with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
        try:
            return STEPS[step](model), None
        except RefgradError:
            return None, None
        except Exception as error:
            return None, JourneyFault(step, type(error).__name__, place_of(error), str(error)[:200])


class Clock:
    """How long the steps take, and how much memory this process has taken in the largest of them."""

    def __init__(self) -> None:
        self.seconds, self.peak, self.slowest, self.largest = 0.0, 0, "", ""
        self._longest = 0.0
        self._start = time.monotonic()
        self.is_exact = _reset_peak()

    def lap(self, step: str) -> None:
        """Count what was done since the last call as `step`."""
        spent, self._start = time.monotonic() - self._start, time.monotonic()
        self.seconds += spent
        if spent > self._longest:
            self._longest, self.slowest = spent, step
        if self.is_exact and (peak := _peak()) > self.peak:
            self.peak, self.largest = peak, step


def _reset_peak() -> bool:
    """Let the system forget how large this process has been. Return whether it can, as Linux does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak() -> int:
    """The most bytes of memory in use that this process has had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) << 10


def place_of(error: BaseException) -> str:
    """The innermost line of refgrad that an exception went through, without its number: "model/graph.py view"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parts = Path(frame.filename).parts
        if (
            any(top in parts for top in ("refgrad", "backends"))
            and "fuzzing" not in parts
            and "site-packages" not in parts
        ):
            return f"{'/'.join(parts[-2:])} {frame.name}"
    return "outside"

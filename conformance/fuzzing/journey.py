"""What is done with a model that is fuzzed: everything that refgrad does with one."""

from __future__ import annotations

import contextlib
import io
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import RefgradError
from refgrad.protos.malformed import fault_of

_MOST = 4096  # elements of a feed
_ROOT = "refgrad"


@dataclass(frozen=True)
class Fault:
    """What a step did that it must not: `kind` is the class of an exception or "invalid result", `place` its innermost line."""

    step: str
    kind: str
    place: str
    message: str


def _run(model: ModelProto) -> None:
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
                return
            feeds[value.name] = np.ones(shape, dtype)
        except (KeyError, ValueError, TypeError):
            return
    get_backend("numpy").prepare(model).run(feeds)


STEPS: dict[str, Callable[[ModelProto], Any]] = {
    "preflight": refgrad.preflight,
    "gradient": refgrad.gradient,
    "gradient ort": lambda model: refgrad.gradient(model, dialect="ort"),
    "jvp": refgrad.jvp,
    "hvp": refgrad.hvp,
    "run": _run,
    "lower": refgrad.lower,
    "expand": refgrad.expand_gradients,
    "text": refgrad.onnx_simple_text_plot,
    "dot": refgrad.to_dot,
}


def journey(written: bytes, steps: tuple[str, ...] = tuple(STEPS)) -> tuple[bool, list[Fault]]:
    """Take a model through `steps`. Return whether it got a gradient, and the faults."""
    warnings.simplefilter("ignore")
    try:
        model = ModelProto.FromString(written)
    except (DecodeError, UnicodeDecodeError):
        return False, []  # whoever reads a file is told so; `read` is the one that does
    faults, differentiated = [], False
    for step in steps:
        with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
            try:
                made = STEPS[step](model)
            except RefgradError:
                continue
            except Exception as error:
                faults.append(Fault(step, type(error).__name__, place_of(error), str(error)[:200]))
                continue
        differentiated |= step == "gradient"
        # What is lowered or expanded may have nothing to change: then it is as valid as it was.
        judged = isinstance(made, ModelProto) and step != "gradient ort"
        if judged and (why := fault_of(made)) and not (step in ("lower", "expand") and fault_of(model)):
            faults.append(Fault(step, "invalid result", "", why[:200]))
    return differentiated, faults


def place_of(error: BaseException) -> str:
    """The innermost line of refgrad that an exception went through, without its number: "forward/graph.py view"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parts = Path(frame.filename).parts
        if (
            any(top in parts for top in ("refgrad", "backends"))
            and "fuzzing" not in parts
            and "site-packages" not in parts
        ):
            return f"{'/'.join(parts[-2:])} {frame.name}"
    return "outside"

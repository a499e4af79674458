"""Is a registered forward the operator? It is compared with what the interpreter computes, on the cases of the operator.

The complex step and the reference do not apply where their forward is another function than the model. For a case of one node
that would hide a mistake: either the forward or the kernel is wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from onnx import NodeProto

from refgrad.backends.numpy import registry as kernels
from refgrad.conformance.case import Case
from refgrad.conformance.oracles.analytic import FORWARDS, KNOWN, KinkError, NotAnalyticError
from refgrad.conformance.oracles.program import NOTHING, ROUNDED, ComplexProgram
from refgrad.conformance.problems.point import in_float64, largest
from refgrad.conformance.problems.problem import ask
from refgrad.errors import RefgradError, counted
from refgrad.tables import extensions, plugins
from refgrad.tables.once import place, qualified, raised_at

_DELIBERATE = (KinkError, NotAnalyticError, NotImplementedError)  # the forward says that it does not know this form

_SINCE = {
    "Softmax": 13,
    "LogSoftmax": 13,
    "BatchNormalization": 9,
}  # the oracles convert a model of an older form first


def has_forward(domain: str, op_type: str) -> bool:
    """True if a forward of the operator is registered: in complex numbers here, or by another package."""
    plugins.load()
    return (domain, op_type) in extensions.FORWARDS or qualified(domain, op_type) in FORWARDS


def fault(case: Case, seed: int = 0) -> str | None:
    """The fault of the forward of the operator that a smooth case is about, or "".

    None where nothing was compared: no forward is registered, the case has several nodes, the interpreter does not run it, or
    the forward says that it does not know this form.
    """
    node = case.subject
    if node is None or not is_comparable(case, node):
        return None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # onnx.reference makes NumPy warn
        try:
            problem = ask(case, seed)
            program = ComplexProgram(problem, KNOWN)
            step = program.step(node)
            computed = in_float64(case.model, problem.wrt).run(problem.at, trace=True)
        except (RefgradError, ValueError):
            return None
        entry = extensions.FORWARDS.get((node.domain, node.op_type))
        known = {"": None, **program.constants, **problem.at, **computed}
        calls = _of_a_package(entry, step) if entry is not None else [(FORWARDS[case.operator], True)]
        faults = [_compared(known, step, function, is_complex) for function, is_complex in calls]
    why = next(filter(None, faults), None)
    if why is None:
        return "" if "" in faults else None
    where = place(entry.function if entry is not None else FORWARDS[case.operator])
    kernel = kernels.find(node.domain, node.op_type, case.opset)
    other = "its function body" if kernel is None else f"its kernel {place(kernel.function)}"
    return f"{case.operator}: the independent forward {where} {why}. It was compared with {other} in {case}."


Called = tuple[Callable[..., Any], bool]


def _of_a_package(entry: extensions.Entry, step: Any) -> list[Called]:
    """The forward as both oracles call it: on numbers in double, and on complex ones where it takes them."""
    attributes = {name: getattr(step, name) for name in (a.name for a in step.onnx_node.attribute)}

    def call(node: Any, *inputs: Any) -> Any:
        return entry.function(*inputs, **attributes)

    return [(call, False), *([(call, True)] if entry.options["analytic"] else [])]


def _compared(known: Mapping[str, Any], step: Any, function: Callable[..., Any], is_complex: bool) -> str | None:
    """The fault in the results of a forward, as the rest of a sentence, "" or None: see `fault`."""
    inputs = [_moved(known[name], is_complex) for name in step.input]
    try:
        results = function(step, *inputs)
    except _DELIBERATE:
        return None
    except Exception as error:  # whatever its author's code raises
        return f"raised {type(error).__name__}: {' '.join(str(error).split())} ({raised_at(error, function)})"
    numbers = "complex numbers" if is_complex else "numbers in double"
    results = results if isinstance(results, tuple) else (results,)
    named = [name for name in step.output if name]
    if len(results) < len(named):
        return f"returned {counted(len(results), 'output')}, and the node names {len(named)}"
    for name, result in zip(step.output, results, strict=False):
        if name in known and (why := _difference(result, known[name])):
            return f"{why} for {name!r} on {numbers}"
    return ""


def _moved(value: Any, is_complex: bool) -> Any:
    """A value as a forward gets it: in the complex step every float is a complex number that does not move."""
    if isinstance(value, list):
        return [_moved(item, is_complex) for item in value]
    is_float = isinstance(value, np.ndarray | np.generic) and value.dtype == np.float64
    return np.asarray(value, np.complex128) if is_complex and is_float else value


def _difference(got: Any, wanted: Any) -> str:
    if isinstance(wanted, list):
        if not isinstance(got, list) or len(got) != len(wanted):
            return f"returned {_described(got)} and not a list of {len(wanted)} arrays"
        return next(filter(None, map(_difference, got, wanted)), "")
    if not isinstance(got, np.ndarray | np.generic):
        return f"returned {_described(got)} and not an array"
    if got.shape != wanted.shape:
        return f"returned shape {got.shape} and not {wanted.shape}"
    if wanted.dtype.kind != "f":
        return "" if np.array_equal(np.real(got), wanted) else "returned other elements"
    if got.dtype.kind not in "fc":
        return f"returned {got.dtype} and not a float"
    real = np.real(got)
    if not np.array_equal(np.isfinite(real), np.isfinite(wanted)):
        return "returned other finite elements"
    there = np.isfinite(wanted)
    apart = largest(real[there] - wanted[there]) / max(largest(wanted[there]), NOTHING)
    return f"differs by {apart:.2g} of the largest element" if apart > ROUNDED else ""


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def few(cases: Iterable[Case], count: int = 3) -> list[Case]:
    """The first cases of each operator in which a forward can be compared."""
    by_shape: dict[str, list[Case]] = {}
    for case in cases:
        node = case.subject
        if node is not None and is_comparable(case, node) and len(by_shape.setdefault(case.operator, [])) < count:
            by_shape[case.operator].append(case)
    return [case for chosen in by_shape.values() for case in chosen]


def is_comparable(case: Case, node: NodeProto) -> bool:
    """True if `node`, which a smooth case is about, has a forward that knows its form."""
    known = case.opset >= _SINCE.get(case.operator, 1) and not case.model.functions
    return known and case.values == "smooth" and has_forward(node.domain, node.op_type)

"""What kernels say of their memory: that of `fresh` ones is new, and what they are given away changes no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import onnx
import pytest
import reuse
from onnx import TensorProto, numpy_helper
from onnx_tests import loaded
from training_operators import CASES, build, typed

from refgrad.backends import get_backend
from refgrad.backends.numpy import registry
from refgrad.conformance.cases import every_case
from refgrad.errors import BackendError

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]
at_every_size = reuse.at_every_size

NUMPY = get_backend("numpy")
PARTS = 8


class Watch:
    """Kernels that look at their inputs and results at every call, in place of the registered ones."""

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self.seen: set[str] = set()

    def watched(self, kernel: registry.Kernel) -> registry.Kernel:
        """`kernel` with its function wrapped, where it says something about memory."""
        if not kernel.fresh and "_free" not in kernel.keywords:
            return kernel
        name = f"{kernel.domain}.{kernel.op_type}-{kernel.since}"

        def function(*inputs: Any, **bound: Any) -> Any:
            self.seen.add(name)
            bound.pop("_free", None)
            given = [_copy(x) for x in inputs]
            results = kernel.function(*inputs, **bound)
            outputs = [y for y in (results if isinstance(results, tuple) else (results,)) if isinstance(y, np.ndarray)]
            if kernel.fresh:
                self.check_fresh(name, inputs, outputs)
            if not all(_identical(x, y) for x, y in zip(inputs, given, strict=True)):
                self.faults.add(f"{name} changes an input that it was not given")
            if "_free" in kernel.keywords:
                again = kernel.function(*given, **bound, _free=tuple(isinstance(x, np.ndarray) for x in given))
                if not _identical(again, results):
                    self.faults.add(f"{name} computes something else in memory that it was given")
            return results

        return replace(kernel, function=function)

    def check_fresh(self, name: str, inputs: tuple[Any, ...], outputs: list[np.ndarray]) -> None:
        """Note results that share memory with an input or with each other, or cannot be written to."""
        arrays = [x for x in inputs if isinstance(x, np.ndarray)]
        if any(np.shares_memory(x, y) for x in arrays for y in outputs):
            self.faults.add(f"{name} returns memory of an input")
        if any(np.shares_memory(y, z) for y, z in combinations(outputs, 2)):
            self.faults.add(f"{name} returns the same memory twice")
        if not all(y.flags.writeable for y in outputs):
            self.faults.add(f"{name} returns what cannot be written to")


def _copy(x: Any) -> Any:
    return x.copy(order="K") if isinstance(x, np.ndarray) else x


def _identical(a: Any, b: Any) -> bool:
    """True if two values have the same types, shapes and bits."""
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_identical, a, b))
    if not isinstance(a, np.ndarray | np.generic):
        return a is b or bool(a == b)
    same = np.asarray(a).dtype == np.asarray(b).dtype and np.shape(a) == np.shape(b)
    return same and (np.array_equal(a, b) if np.asarray(a).dtype.kind == "O" else a.tobytes() == b.tobytes())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    find = registry.find

    def found(domain: str, op_type: str, opset: int) -> registry.Kernel | None:
        kernel = find(domain, op_type, opset)
        return None if kernel is None else watch.watched(kernel)

    monkeypatch.setattr(registry, "find", found)
    yield watch
    assert watch.seen
    assert not watch.faults


def run(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> None:
    """Run the model; what is wrong with it is for other tests to say."""
    with suppress(BackendError):
        NUMPY.prepare(model).run(feeds)


@pytest.mark.parametrize("part", range(PARTS))
def test_of_cases(watch: Watch, part: int):
    for case in every_case()[part::PARTS]:
        run(case.model, case.feeds)


def test_of_gradient_kernels(watch: Watch):
    for case in CASES:
        for kind in (np.float32, np.float64):
            built = build(case)
            run(built.gradient(kind), typed(built.feeds, kind))


@pytest.mark.parametrize("part", range(PARTS))
def test_of_node_tests(watch: Watch, part: int):
    for test in list(loaded().values())[part::PARTS]:
        if test.model is not None and test.data_sets:
            names = [value.name for value in test.model.graph.input]
            run(test.model, {n: _value(x) for n, x in zip(names, test.data_sets[0][0], strict=False)})


def _value(feed: Any) -> Any:
    if isinstance(feed, TensorProto):
        return numpy_helper.to_array(feed)
    return np.asarray(feed) if isinstance(feed, np.generic) else feed


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = x.copy()
    return y, y[:1]


def _doubled(x: np.ndarray) -> np.ndarray:
    x *= 2
    return x.copy()


def _overwritten(x: np.ndarray, *, _free: tuple[bool, ...] = ()) -> np.ndarray:
    result = np.add(x, 1, out=x if _free else None)
    return np.add(result, x)


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (lambda x: x[1:], "returns memory of an input"),
        (_halves, "returns the same memory twice"),
        (lambda x: np.broadcast_to(np.zeros(1), 3), "returns what cannot be written to"),
        (_doubled, "changes an input that it was not given"),
        (_overwritten, "computes something else in memory that it was given"),
    ],
)
def test_a_wrong_kernel_is_found(function: Callable[..., Any], fault: str):
    watch = Watch()
    keywords = {"_free": ()} if function is _overwritten else {}
    kernel = registry.Kernel(function, "", "Planted", 1, False, True, keywords, {})
    watch.watched(kernel).function(np.arange(3.0))
    assert watch.faults == {f".Planted-1 {fault}"}

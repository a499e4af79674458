"""A builder that makes no gradient and an executor that returns no outputs are said to, and no node is accused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto
from planting import Elsewhere, builder_with, network

import refgrad
from refgrad import cli
from refgrad.backends import Prepared
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance import compare
from refgrad.conformance.locating import sides
from refgrad.conformance.locating.bisection import bisect
from refgrad.conformance.locating.location import locate
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.problems.systems import builders, executors
from refgrad.conformance.problems.systems.builders import of_function
from refgrad.conformance.reports import comparisons
from refgrad.errors import AnswerError

pytestmark = pytest.mark.interpreter


def built_by(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda problem: of_function(function, problem)


NO_GRADIENTS = {
    "it returned None instead of a ModelProto. Return a model with an input <output>_grad": lambda m, w, o: None,
    "it returned a dict instead of a ModelProto": lambda m, w, o: {"x": np.zeros(3)},
    "it cannot be called as function(model, wrt, outputs): too many positional": lambda m: refgrad.gradient(m),
}


@pytest.mark.parametrize("said", NO_GRADIENTS)
def test_a_function_that_makes_no_gradient_accuses_no_node(said: str) -> None:
    model, feeds = network()
    build = built_by(NO_GRADIENTS[said])
    found = bisect(model, feeds, build)
    assert found.faults == ()
    assert said in found.nothing
    compared = compare(model, "refgrad@numpy", Live(build, "numpy"), feeds)
    assert said in compared.b.failed
    lines = list(comparisons.lines_of(compared.b))
    assert not [line for line in lines if "is at fault:" in line and "no node" not in line]
    assert any(
        line.startswith("no node is at fault: it makes no gradient of a model of one Identity") for line in lines
    )


def test_a_function_of_a_problem_must_return_a_built() -> None:
    model, feeds = network()
    found = compare(model, "refgrad@numpy", Live(lambda problem: None, "numpy"), feeds)
    assert found.b.failed == "it returned None and no Built, which a function of a problem must return"
    assert found.b.rules is not None
    assert found.b.rules.faults == ()


def test_a_function_that_forgets_to_return_for_one_operator_is_located() -> None:
    model, feeds = network()

    def forgets(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto | None:
        if any(node.op_type == "LayerNormalization" for node in model.graph.node):
            return None
        return refgrad.gradient(model, wrt, outputs)

    found = bisect(model, feeds, built_by(forgets))
    assert [fault.nodes for fault in found.faults] == [("LN",)]
    assert "it returned None instead of a ModelProto" in found.faults[0].message
    assert found.nothing == ""


def test_reduce_says_which_side_makes_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("empty_handed")
    module.build = lambda model, wrt, outputs: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "empty_handed", module)
    monkeypatch.setattr(sides.Worker, "call", lambda self, function, *given: function(*given))
    model, _ = network()
    onnx.save(model, tmp_path / "m.onnx")
    words = ["reduce", str(tmp_path / "m.onnx"), "--side", "empty_handed:build@numpy", "-o", str(tmp_path / "made")]
    assert cli.main(words) == 2
    assert "empty_handed:build@numpy makes no gradient: it returned None instead of a Mod" in capsys.readouterr().err


class Unprepared(NumpyBackend):
    """An executor that prepares nothing."""

    name = "unprepared"

    def prepare(self, *arguments: Any, **options: Any) -> Any:
        return None


class Whole(NumpyBackend):
    """An executor whose run as a whole returns something else."""

    name = "whole"

    def __init__(self, change: Callable[[dict[str, Any]], Any]) -> None:
        self._change = change

    def prepare(self, *arguments: Any, **options: Any) -> Any:
        return Changed(super().prepare(*arguments, **options), self._change)


class Changed(Prepared):
    def __init__(self, prepared: Any, change: Callable[[dict[str, Any]], Any]) -> None:
        self._prepared, self._change = prepared, change
        self.inputs, self.outputs = prepared.inputs, prepared.outputs

    def run(self, feeds: Any, outputs: Any = None) -> Any:
        return self._change(self._prepared.run(feeds, outputs))


EXECUTORS = {
    "the prepare of unprepared returned None; it must return an object whose run(feeds, outputs)": Unprepared(),
    "whole returned None and no outputs by name: run must return a dict of arrays": Whole(lambda results: None),
    "whole returned a list and no outputs by name: run": Whole(lambda results: list(results.values())),
    "whole returned no output 'y'; it returned none": Whole(lambda results: {}),
    "but a list: run must return a dict of arrays": Whole(lambda r: {n: v.tolist() for n, v in r.items()}),
    "its result has the shape [1, 2, 3] instead of [2, 3]": Elsewhere(lambda name, value: value[None]),
    "its result has the type float64 instead of float32": Elsewhere(lambda name, value: value.astype(np.float64)),
}


@pytest.mark.parametrize("said", EXECUTORS)
def test_an_executor_that_returns_no_outputs_accuses_no_node(said: str) -> None:
    model, feeds = network()
    backend = sides._Guarded(EXECUTORS[said])
    found = locate(model, feeds, backend)
    assert (found.culprits, found.acquitted, found.suspects) == ((), (), ())
    assert said in found.failed
    compared = compare(model, "refgrad@numpy", Live(builder_with(lambda made: None), backend), feeds)
    if "the type" in said:  # of an object the numbers are compared, in whatever type
        return
    assert not compared.ok
    lines = list(comparisons.lines_of(compared.b))
    assert any("a model of one Identity either" in line and said in line for line in lines)
    assert not [line for line in lines if "is at fault" in line or "inf" in line or "is right" in line]


def test_the_suite_says_the_same_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("unprepared_runtime")
    module.Unprepared = Unprepared  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unprepared_runtime", module)
    model, feeds = network()
    with pytest.raises(AnswerError, match="the prepare of unprepared_runtime:Unprepared returned None"):
        executors.run("unprepared_runtime:Unprepared", model, feeds)
    assert builders._why_not_called(len, (1, 2))
    assert builders._why_not_called(lambda *given: None, (1, 2)) == ""

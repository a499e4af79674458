"""Executors and builders with planted faults, and networks to find them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import ModelProto, NodeProto, helper, numpy_helper

import refgrad
from refgrad.backends import Backend, Prepared, available, get_backend
from refgrad.backends.base import load_model
from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import Watching
from refgrad.conformance.problems.observation import Built
from refgrad.conformance.problems.problem import Problem

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
Fault = Callable[[NodeProto, list[Any]], list[Any] | None]


def of(op_type: str, change: Callable[..., Any], number: int | None = None) -> Fault:
    """A fault of one operator: `change` takes the inputs and the result. With `number`, of one node alone."""

    def fault(node: NodeProto, values: list[Any]) -> list[Any] | None:
        if node.op_type != op_type or (number is not None and node.name != f"{op_type}_{number}"):
            return None
        results = values[len(node.input) :]
        return [np.asarray(change(*values[: len(node.input)], results[0]), results[0].dtype), *results[1:]]

    return fault


NETWORK = """
    <ir_version: 8, opset_import: ["": 18]> network (float[N, 6] x) => (float[N, 4] y) {
        [MatMul_1] a = MatMul (x, w1)  [Add_1] b = Add (a, b1)  [Softmax_1] s = Softmax (b)
        [LN] n = LayerNormalization (s, scale)  [MatMul_2] c = MatMul (n, w2)  [Tanh_1] t = Tanh (c)
        [Softmax_2] p = Softmax (t)  [ReduceMean_1] m = ReduceMean (p, axes)  [Mul_1] y = Mul (p, m)
    }"""


def network() -> tuple[ModelProto, dict[str, np.ndarray]]:
    model, rng = onnx.parser.parse_model(NETWORK), np.random.default_rng(0)
    shapes = {"w1": (6, 8), "b1": (8,), "w2": (8, 4), "scale": (8,)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    values["axes"] = np.array([1])
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model, {"x": rng.standard_normal((5, 6)).astype(np.float32)}


class Planted(Backend):
    """The interpreter, some of whose nodes compute something else, those in bodies too."""

    name = "planted"

    def __init__(self, of: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
        self.of, self.change = of, change

    def description(self) -> str:
        return "the interpreter with a planted fault"

    def prepare(self, model: Any, **options: Any) -> Prepared:
        def watch(node: NodeProto, inputs: Any, outer: Any, compute: Any) -> tuple[Any, ...]:
            results = compute()
            if node.name != self.of:
                return results
            return (np.asarray(self.change(results[0]), np.asarray(results[0]).dtype), *results[1:])

        return NumpyBackend().prepare(load_model(model), precision=Watching(watch))


# Rules


def builder_with(fault: Callable[[ModelProto], None]) -> Callable[[Problem], Built]:
    """refgrad's gradient with a planted fault."""

    def build(problem: Problem) -> Built:
        made = refgrad.gradient(problem.model, problem.wrt, list(problem.cotangents))
        fault(made)
        return Built.of(made)

    return build


def scaled(of_node: str, factor: float) -> Callable[[ModelProto], None]:
    """The first thing that the rule of a node emits is multiplied."""

    def fault(made: ModelProto) -> None:
        node = next(
            (one for one in made.graph.node if one.name.startswith(f"{of_node}_Grad/") and one.op_type in _PLAIN), None
        )
        if node is not None:
            output, node.output[0] = node.output[0], f"{node.output[0]}_unscaled"
            made.graph.initializer.append(numpy_helper.from_array(np.float32(factor), f"{of_node}_factor"))
            at = next(k for k, one in enumerate(made.graph.node) if one.name == node.name)
            scale = helper.make_node("Mul", [node.output[0], f"{of_node}_factor"], [output], f"{of_node}_planted")
            made.graph.node.insert(at + 1, scale)

    return fault


_PLAIN = ("Mul", "Gemm", "MatMul", "Sub", "ReduceSum", "Div", "Add")


class Elsewhere(Backend):
    """The interpreter whose results are made into something else."""

    name = "elsewhere"

    def __init__(self, change: Callable[[str, Any], Any]) -> None:
        self._change = change

    def description(self) -> str:
        return "the interpreter with other results"

    def prepare(self, model: Any, **options: Any) -> Prepared:
        prepared = get_backend("numpy").prepare(model)
        run = prepared.run

        def changed(feeds: Any, outputs: Any = None) -> dict[str, Any]:
            return {name: self._change(name, value) for name, value in run(feeds, outputs).items()}

        prepared.run = changed  # type: ignore[method-assign]
        return prepared

"""Random graphs of If, Loop and Scan within each other, whose bodies declare fewer or more shapes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
UNARY = ("Sin", "Tanh", "Sigmoid", "Softsign", "Elu", "Gelu", "Softmax", "Neg", "Erf")
OTHERS = ("Mul", "Max", "TopK", "LayerNormalization", "Cast", "Reshape", "Split", "ReduceMean", "Sizes")
BODIES = ("If", "Loop", "Scan")


class RandomGraph:
    """One graph per seed. Every value that is passed on is float[3].

    :param hidden: the probability that a formal input or output of a body does not declare its shape.
    """

    def __init__(self, seed: int, hidden: float) -> None:
        self._random = random.Random(seed)
        self._hidden = hidden
        self._count = 0

    def model(self) -> ModelProto:
        """The model, with inputs x, w: float[3], Q: float[2, 3], m: int64, c, d: bool."""
        nodes, values = self._nodes(["x", "w"], 2, self._random.randint(2, 5))
        nodes.append(helper.make_node("Mul", [values[-1], self._random.choice(values)], ["y"]))
        kinds = {
            "x": (FLOAT, [3]),
            "w": (FLOAT, [3]),
            "Q": (FLOAT, [2, 3]),
            "m": (INT64, []),
            "c": (BOOL, []),
            "d": (BOOL, []),
        }
        inputs = [helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()]
        graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", FLOAT, [3])])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)

    def feeds(self) -> dict[str, np.ndarray]:
        """What to feed the model."""
        rng = np.random.default_rng(self._random.randrange(2**32))
        sizes = {"x": 3, "w": 3, "Q": (2, 3)}
        floats = {name: rng.uniform(0.2, 1, size).astype(np.float32) for name, size in sizes.items()}
        return floats | {"m": np.array(2), "c": np.array(self._random.random() < 0.5), "d": np.array(True)}

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _value(self, name: str) -> ValueInfoProto:
        shape: Any = [3]
        if self._random.random() < self._hidden:
            shape = self._random.choice([None, [None]])
        return helper.make_tensor_value_info(name, FLOAT, shape)

    def _nodes(self, outer: list[str], depth: int, count: int) -> tuple[list[NodeProto], list[str]]:
        """Nodes, and all values that are known behind them."""
        nodes: list[NodeProto] = []
        values = list(outer)

        def add(op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
            made = [self._fresh() for _ in range(outputs)]
            nodes.append(helper.make_node(op_type, list(inputs), made, **attributes))
            return made[0] if outputs == 1 else made

        for _ in range(count):
            op_type = self._random.choice((*UNARY, *OTHERS, *(BODIES * 4 if depth else ())))
            a, b = self._random.choice(values), self._random.choice(values)
            match op_type:
                case "Mul" | "Max" | "LayerNormalization":
                    made = add(op_type, a, b)
                case "TopK":
                    made, _ = add(op_type, a, add("Constant", value_ints=[3]), outputs=2)
                case "Cast":
                    made = add("Cast", add("Cast", a, to=TensorProto.DOUBLE), to=FLOAT)
                case "Reshape":
                    made = add("Reshape", add("Reshape", b, add("Constant", value_ints=[-1, 1])), add("Shape", a))
                case "Split":
                    first, second = add("Split", a, add("Constant", value_ints=[1, 2]), outputs=2)
                    made = add("Concat", second, first, axis=0)
                case "ReduceMean":
                    made = add("Sub", a, add("ReduceMean", a))
                case "Sizes":
                    varied = add("If", "c", then_branch=self._sized(a), else_branch=self._sized(b))
                    sizes = add("Concat", add("Shape", a), add("Shape", varied), axis=0)
                    first, second = add("Split", add("Concat", varied, b, axis=0), sizes, outputs=2)
                    whole = add("Concat", add("Sin", first), second, axis=0)
                    made = add("Mul", add("ReduceMean", whole), b)
                case "If":
                    made = add(
                        "If", "c", then_branch=self._branch(values, depth), else_branch=self._branch(values, depth)
                    )
                case "Loop" | "Scan":
                    starts = ("m", "d", a) if op_type == "Loop" else (a, "Q")
                    settings = {} if op_type == "Loop" else {"num_scan_inputs": 1}
                    made, rows = add(op_type, *starts, outputs=2, body=self._body(op_type, values, depth), **settings)
                    values.append(add("ReduceSum", rows, add("Constant", value_ints=[0]), keepdims=0))
                case _:
                    made = add(op_type, a)
            values.append(made)
        return nodes, values

    def _sized(self, value: str) -> GraphProto:
        """A branch that returns as many elements of `value` as it likes."""
        first, last, part, result = (self._fresh() for _ in range(4))
        nodes = [
            helper.make_node("Constant", [], [first], value_ints=[0]),
            helper.make_node("Constant", [], [last], value_ints=[self._random.randint(1, 3)]),
            helper.make_node("Slice", [value, first, last], [part]),
            helper.make_node(self._random.choice(UNARY), [part], [result]),
        ]
        return helper.make_graph(nodes, self._fresh(), [], [helper.make_tensor_value_info(result, FLOAT, [None])])

    def _branch(self, values: list[str], depth: int) -> GraphProto:
        nodes, known = self._nodes(values, depth - 1, self._random.randint(1, 3))
        result = self._fresh()
        nodes.append(helper.make_node("Identity", [self._random.choice(known[len(values) :])], [result]))
        return helper.make_graph(nodes, self._fresh(), [], [self._value(result)])

    def _body(self, op_type: str, values: list[str], depth: int) -> GraphProto:
        """The body of a Loop or a Scan with one state and one row per step."""
        state, made, row = self._fresh(), self._fresh(), self._fresh()
        inputs, outputs, more = [self._value(state)], [self._value(made), self._value(row)], [state]
        first: list[NodeProto] = []
        if op_type == "Loop":
            number, going, again = self._fresh(), self._fresh(), self._fresh()
            inputs[:0] = [
                helper.make_tensor_value_info(number, INT64, []),
                helper.make_tensor_value_info(going, BOOL, []),
            ]
            outputs[:0] = [helper.make_tensor_value_info(again, BOOL, [])]
            first.append(helper.make_node("Identity", [going], [again]))
        else:
            more.append(self._fresh())
            inputs.append(self._value(more[-1]))
        nodes, known = self._nodes([*values, *more], depth - 1, self._random.randint(1, 3))
        last = [helper.make_node("Add", [known[-1], state], [made])]
        last.append(helper.make_node("Neg", [self._random.choice(known[len(values) + len(more) :])], [row]))
        return helper.make_graph([*first, *nodes, *last], self._fresh(), inputs, outputs)

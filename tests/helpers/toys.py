"""An executor and a builder with faults, outside of the package, for tests of what a newcomer is told about them."""

from __future__ import annotations

from onnx import ModelProto, helper

import refgrad
from refgrad.backends import get_backend
from refgrad.backends.base import Backend, Prepared, graph_inputs, graph_outputs, load_model

MISSING = "Erf"  # the operator that the executor lacks
WRONG = "Softmax"  # the operator that it computes wrongly for negative axes
RAISING = "LpNormalization"  # the operator whose kernel raises on empty inputs
LOST = "Tanh"  # the operator whose rule in the builder has lost a sign


class Runtime(Backend):
    """The interpreter with three faults."""

    name = "toy"

    def description(self) -> str:
        return "a toy"

    def prepare(self, model, **options):
        return _Prepared(load_model(model))


class _Prepared(Prepared):
    def __init__(self, model: ModelProto) -> None:
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)
        if any(node.op_type == MISSING for node in model.graph.node):
            raise NotImplementedError(f"there is no {MISSING} here")
        self.raises = any(node.op_type == RAISING for node in model.graph.node)
        wrong = ModelProto()
        wrong.CopyFrom(model)
        for node in wrong.graph.node:
            if node.op_type == WRONG:
                _spoil(node)
        self.real = get_backend("numpy").prepare(wrong)

    def run(self, feeds, outputs=None):
        if self.raises and any(value.size == 0 for value in feeds.values()):
            raise IndexError("index 0 is out of bounds")
        return self.real.run(feeds, outputs)


def _spoil(node) -> None:
    """Take a negative axis for the first one."""
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    if axis < 0:
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", 0))


def gradient(model: ModelProto, wrt: list[str], outputs: list[str]) -> ModelProto:
    """refgrad's gradient, with a sign lost in one rule."""
    made = refgrad.gradient(model, wrt, outputs)
    if not any(node.op_type == LOST for node in model.graph.node):
        return made
    names = {f"{name}_grad" for name in wrt}
    for node in made.graph.node:
        node.output[:] = [f"{name}_lost" if name in names else name for name in node.output]
    made.graph.node.extend(helper.make_node("Neg", [f"{name}_lost"], [name]) for name in sorted(names))
    return made

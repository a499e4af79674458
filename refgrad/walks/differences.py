"""Central differences of the differentiated output by one element of any forward value, in float64.

Only the nodes behind that value are run again. The difference is Richardson's extrapolation of two steps, whose error is of the
fourth order (Press et al. 2007, "Numerical Recipes", section 5.7).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from refgrad import traits
from refgrad.backends.numpy import NumpyBackend
from refgrad.backends.numpy.backend import NumpyModel
from refgrad.conformance.case import is_float
from refgrad.errors import RefgradError
from refgrad.protos.traverse import nested, reads_of
from refgrad.tables.randomness import ALWAYS, IN_TRAINING, operator_of
from refgrad.walks.records import Difference

_STEPS = (1e-4, 1e-6)  # relative to the element: the second where something bends within the first
_TRIED = 3  # elements
_AGREE = 1e-4  # of the differences of a step and of its half
_BENT = 0.75  # how much of the distance of both sides is left at half the step: half where nothing bends
_NOISE = 1e-13  # the rounding of the output, relative to its size, per step
WORK = 2e9  # elements, and twice as many products, that all differences of a walk may compute: some seconds
NODE = 4e4  # what a node costs besides


class Differences:
    """The differentiated output as a function of each forward value."""

    @np.errstate(all="ignore")
    def __init__(
        self, gradient: ModelProto, nodes: Sequence[NodeProto], known: Mapping[str, Any], of: str, at: int
    ) -> None:
        """Take the forward nodes `nodes` of a gradient model, at the values `known`; element `at` of the output `of`.

        :raises RefgradError: the model does not run in float64.
        """
        self._gradient, self._nodes, self._of, self._at = gradient, list(nodes), of, at
        made = {name for node in nodes for name in node.output if name}
        self._reads = [frozenset(filter(None, reads_of(node))) for node in nodes]
        given = set().union(*self._reads) - made if nodes else {of}
        self._wide = {name: _wide(known[name]) for name in given if name in known}
        asked = [name for node in nodes for name in node.output if name]
        self._wide |= self._prepared(nodes, self._wide).run(self._wide, asked or [of])
        output = np.asarray(self._wide[of]).reshape(-1)
        self.is_finite = bool(np.isfinite(output[at : at + 1]).all())  # where not, there are no differences
        self.random = any(self._draws(node) for node in nested(nodes))
        self.is_spent = False  # whether a difference was left out because it takes long
        self._spent = 0.0

    def _draws(self, node: NodeProto) -> bool:
        """True if a node draws random numbers: another run of it gives others."""
        operator = operator_of(node)
        if operator not in IN_TRAINING:
            return operator in ALWAYS
        place = IN_TRAINING[operator]
        given = node.input[place] if place < len(node.input) else ""
        return bool(given) and bool(np.any(self._wide.get(given, True)))

    @np.errstate(all="ignore")  # the values may be infinite
    def by(self, name: str, gradient: np.ndarray, left_out: np.ndarray | None) -> Difference | None:
        """The difference by the element with the largest gradient, and that gradient; None where there is none.

        :param left_out: the elements at a kink.
        """
        value = self._wide.get(name)
        if not isinstance(value, np.ndarray) or value.shape != gradient.shape or not value.size or self.random:
            return None
        nodes = self._behind_of({name})
        work = sum(NODE + self._work(node) for node in nodes)
        if self._spent + 4 * work > WORK:
            self.is_spent = True
            return None
        size = np.abs(gradient.astype(np.float64)).reshape(-1)
        if left_out is not None:
            size = np.where(left_out.reshape(-1), -1.0, size)
        size = np.where(np.isfinite(size), size, -1.0)
        fed = {n for node in nodes for n in reads_of(node) if n} - {n for node in nodes for n in node.output}
        feeds = {n: self._wide[n] for n in (*fed, name) if n in self._wide}
        if not nodes:  # nothing depends on it, or it is the output itself
            prepared = None
        else:
            try:
                prepared = self._prepared(nodes, feeds)
            except RefgradError:
                return None
        scale = float(np.sqrt(np.mean(np.square(value)))) if np.isfinite(value).all() else 1.0
        for place in np.argsort(-size, kind="stable")[:_TRIED]:
            if size[place] < 0:
                break
            at = tuple(int(k) for k in np.unravel_index(int(place), value.shape))
            self._spent += 4 * work
            try:
                found = self._central(prepared, feeds, name, at, max(abs(float(value[at])), scale) or 1.0)
            except RefgradError:
                return None
            if found is not None:
                exact = float(gradient[at])
                return Difference(name, at, found, exact, abs(found - exact))
        return None

    def _central(
        self, prepared: NumpyModel | None, feeds: Mapping[str, Any], name: str, at: tuple[int, ...], size: float
    ) -> float | None:
        """The difference by one element; None where both sides differ, or nothing finite is found."""
        here = self._output(prepared, feeds, name, at, 0.0)
        for relative in _STEPS:
            step = relative * size
            far = [self._output(prepared, feeds, name, at, t * step) for t in (-1.0, 1.0)]
            near = [self._output(prepared, feeds, name, at, t * step / 2) for t in (-1.0, 1.0)]
            if not np.isfinite([here, *far, *near]).all():
                continue
            coarse, fine = (far[1] - far[0]) / (2 * step), (near[1] - near[0]) / step
            gap = abs(far[1] - 2 * here + far[0]) / step
            gap_near = abs(near[1] - 2 * here + near[0]) / (step / 2)
            noise = _NOISE * max(map(abs, (here, *far))) / step
            largest = max(abs(coarse), abs(fine))
            if gap_near > _BENT * gap and gap_near > 1e-5 * largest + 8 * noise:
                continue
            if abs(fine - coarse) > _AGREE * largest + 8 * noise:
                continue
            return float((4 * fine - coarse) / 3)
        return None

    def _output(
        self, prepared: NumpyModel | None, feeds: Mapping[str, Any], name: str, at: tuple[int, ...], step: float
    ) -> float:
        moved = np.array(feeds[name])
        moved[at] += step
        if prepared is None:
            result = moved if name == self._of else self._wide[self._of]
        else:
            result = prepared.run({**feeds, name: moved})[self._of]
        result = np.asarray(result).reshape(-1)
        return float(result[self._at]) if self._at < result.size else float("nan")

    def _behind_of(self, names: Collection[str]) -> list[NodeProto]:
        """The nodes that depend on a value, and that the output depends on."""
        moved, later = set(names), []
        for node, reads in zip(self._nodes, self._reads, strict=True):
            if not moved.isdisjoint(reads):
                moved.update(filter(None, node.output))
                later.append((node, reads))
        needed, kept = {self._of}, []
        for node, reads in reversed(later):
            if not needed.isdisjoint(node.output):
                needed |= reads
                kept.append(node)
        return kept[::-1]

    def _work(self, node: NodeProto) -> float:
        """The elements that a node reads and writes, and the products that it computes of them."""
        sizes = [v.size for n in (*node.input, *node.output) if isinstance(v := self._wide.get(n), np.ndarray)]
        if node.op_type in traits.PRODUCTS and len(sizes) > 2:
            a, b, result = sizes[0], sizes[1], sizes[-1]
            weight = self._wide[node.input[1]]
            convolved = b / max(weight.shape[0], 1) * (a if node.op_type == "ConvTranspose" else result)
            return sum(sizes) + 0.5 * (convolved if "Conv" in node.op_type else math.sqrt(a * b * result))
        return sum(sizes)

    def _prepared(self, nodes: Sequence[NodeProto], feeds: Mapping[str, Any]) -> NumpyModel:
        """The nodes as a model in float64 whose inputs are `feeds`."""
        model = ModelProto(ir_version=self._gradient.ir_version)
        model.opset_import.extend(self._gradient.opset_import)
        model.functions.extend(self._gradient.functions)
        model.graph.name = "behind"
        model.graph.node.extend(nodes)
        model.graph.input.extend(helper.make_value_info(name, _type_of(value)) for name, value in feeds.items())
        model.graph.output.append(helper.make_value_info(self._of, _type_of(np.zeros(()))))
        model.graph.output[0].type.tensor_type.ClearField("shape")
        return NumpyBackend().prepare(model, precision="float64")


def _type_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return helper.make_sequence_type_proto(_type_of(value[0] if value else np.zeros(0)))
    array = np.asarray(value)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_type_proto(kind, array.shape)


def _wide(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_wide(item) for item in value]
    return value.astype(np.float64) if is_float(value) else value

"""A model in float64 on onnx.reference, node by node: it shares no kernel with the interpreter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TypeProto, helper, numpy_helper
from onnx.reference.op_run import OpRun

from refgrad.backends.numpy.precision import Float64
from refgrad.backends.numpy.registry import default_attributes
from refgrad.conformance.case import qualified
from refgrad.conformance.questions.point import ShapeMovedError, in_float64, largest, with_defaults
from refgrad.conformance.questions.question import Question
from refgrad.errors import BackendError, RefgradError
from refgrad.forward.functions import call_functions
from refgrad.forward.inference import infer
from refgrad.protos import native
from refgrad.protos.external import array_of
from refgrad.protos.inlining import INLINED, inline_functions
from refgrad.protos.types import FLOATS, type_of
from refgrad.protos.upgrade import upgrade
from refgrad.protos.walk import import_domain, subgraphs, versions_of
from refgrad.tables import extensions
from refgrad.tables.definitions import DEFINITIONS

SAME = 1e-9  # two forwards compute one function: by how much they may differ, relative to the largest element
ROUNDED = 1e-6  # the same with something in float32: a constant, or what an implementation works in
NOTHING = 1e-30  # no output is smaller
_UPGRADED = 21  # the opset that an older model is converted to where onnx.reference does not know its own
_NARROW = FLOATS - {onnx.TensorProto.DOUBLE}
_DOUBLE = Float64()

Outputs = Mapping[str, np.ndarray]
Call = Callable[..., Sequence[Any]]  # what computes a node of onnx.reference


class ComplexProgram:
    """The model of a question: every float is a double, and operators of ours and functions are in their bodies' form.

    :param kept: where given, the operators of ai.onnx that keep their node; all others become their schema's body where they
        have one.
    :param upgraded: whether a model of an older opset is converted first.
    :raises BackendError: onnx.reference does not know the model.
    """

    def __init__(self, question: Question, kept: Collection[str] | None = None, upgraded: bool = False) -> None:
        self.outputs = tuple(question.cotangents)
        self._shapes = {name: cotangent.shape for name, cotangent in question.cotangents.items()}
        model = in_bodies(with_defaults(question.model, question.wrt))
        if upgraded:
            model = upgrade(model, _UPGRADED)
        widen(model.graph, versions_of(model))
        try:
            if kept is not None:
                model = _expanded(model, kept)
            self._evaluator = native.reference(model, OWN + _of_packages())
        except Exception as error:  # whatever a constructor of onnx.reference raises, it does not know the model
            raise BackendError(f"onnx.reference does not take the model: {_line(error)}.") from error
        self.nodes = _needed(self._evaluator.rt_nodes_, self.outputs)

    @property
    def length(self) -> int:
        """How many nodes are computed."""
        return len(self.nodes)

    @property
    def operators(self) -> set[str]:
        """The operators that are computed, with their domains."""
        return {qualified(node.onnx_node) for node in self.nodes}

    @property
    def constants(self) -> Mapping[str, Any]:
        """The initializers by name."""
        known: Mapping[str, Any] = self._evaluator.rt_inits_
        return known

    def run(self, at: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The outputs of the question where its model is fed `at`.

        :raises ShapeMovedError: an output has another shape there.
        :raises BackendError: onnx.reference fails, or leaves float64.
        """
        return self.through(at, execute)

    @np.errstate(all="ignore")
    def through(self, at: Mapping[str, Any], call: Call) -> dict[str, np.ndarray]:
        """The outputs where `call` computes each node."""
        values = _computed(self.nodes, {**self._evaluator.rt_inits_, **at}, call)
        for name, shape in self._shapes.items():
            if values[name].shape != shape:
                raise ShapeMovedError(f"onnx.reference gives {name!r} the shape {values[name].shape}, not {shape}")
        return {name: values[name] for name in self.outputs}


def _computed(nodes: Sequence[Any], given: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """The given values, and the values that the nodes compute from them."""
    values: dict[str, Any] = {"": None, **given}
    for node in nodes:
        inputs = [values[name] for name in node.input]
        structure = None if node.onnx_node.domain else STRUCTURES.get(node.op_type)
        if structure is not None:

            def run(graph: Any, fed: Sequence[Any]) -> list[Any]:
                """The results of a graph of the node, which reads what lies around it."""
                inner = dict(zip(graph.input_names, fed, strict=True))
                found = _computed(graph.rt_nodes_, {**values, **graph.rt_inits_, **inner}, call)
                return [found[name] for name in graph.output_names]

            results: Sequence[Any] = structure(node, inputs, run)
        else:
            results = call(node, inputs, values) if node.need_context() else call(node, inputs)
        for name, value in zip(node.output, results, strict=False):
            values[name] = value
            if getattr(value, "dtype", None) in _narrow_dtypes():
                raise BackendError(f"onnx.reference computes {node.op_type} in {value.dtype}, where double is fed.")
    return values


Run = Callable[[Any, Sequence[Any]], list[Any]]


def _if(node: Any, inputs: Sequence[Any], run: Run) -> list[Any]:
    return run(node.then_branch if _true(inputs[0]) else node.else_branch, ())


def _loop(node: Any, inputs: Sequence[Any], run: Run) -> list[Any]:
    """Steps of the body until there are enough of them, or the condition says so."""
    most, condition, *state = (*inputs, None)[: max(len(inputs), 2)]
    going, rows = condition is None or _true(condition), list[list[Any]]()
    while going and (most is None or len(rows) < int(np.asarray(most).item())):
        again, *results = run(node.body, (np.array(len(rows)), np.array(True), *state))
        state, going = results[: len(state)], _true(again)
        rows.append(results[len(state) :])
    return [*state, *_stacks(rows, len(node.body.output_names) - 1 - len(state))]


def _scan(node: Any, inputs: Sequence[Any], run: Run) -> list[Any]:
    """A step of the body for each slice of the inputs that are scanned."""
    given = {a.name: helper.get_attribute_value(a) for a in node.onnx_node.attribute}
    first = len(inputs) - given["num_scan_inputs"]
    state, made = list(inputs[:first]), len(node.body.output_names) - first

    def setting(name: str, count: int) -> list[int]:
        return given.get(f"scan_{name}") or [0] * count

    slices = [
        np.moveaxis(x, axis, 0)[:: -1 if back else 1]
        for x, axis, back in zip(
            inputs[first:],
            setting("input_axes", len(inputs) - first),
            setting("input_directions", len(inputs) - first),
            strict=True,
        )
    ]
    rows: list[list[Any]] = []
    for step in range(len(slices[0])):
        results = run(node.body, (*state, *(x[step, ...] for x in slices)))
        state = results[:first]
        rows.append(results[first:])
    stacks = zip(_stacks(rows, made), setting("output_axes", made), setting("output_directions", made), strict=True)
    return [*state, *(np.moveaxis(stack[:: -1 if back else 1], 0, axis) for stack, axis, back in stacks)]


def _true(condition: Any) -> bool:
    return bool(np.asarray(condition).item())


def _stacks(rows: Sequence[Sequence[Any]], count: int) -> list[np.ndarray]:
    """The rows of each result on one another; where there are none, nobody knows their shape."""
    if not rows and count:
        raise BackendError("No step is made, so that no shape of what the steps give is known.")
    return [np.stack(column) for column in zip(*rows, strict=True)]


STRUCTURES: Mapping[str, Callable[[Any, Sequence[Any], Run], list[Any]]] = {"If": _if, "Loop": _loop, "Scan": _scan}


def departure(question: Question, results: Outputs, truth: Outputs) -> tuple[float, str]:
    """How far `results` are from what the interpreter computes, relative to the largest element, and where."""
    worst, why = 0.0, ""
    for name in question.cotangents:
        got, wanted = results[name], truth[name]
        if not np.array_equal(np.isfinite(got), np.isfinite(wanted)):
            return np.inf, f"it computes another {name!r} than the interpreter: other elements of it are finite"
        there = np.isfinite(wanted)
        error, size = largest(got[there] - wanted[there]), largest(wanted[there])
        apart = error / max(size, NOTHING)
        if apart > worst:
            worst, why = apart, f"it computes another {name!r} than the interpreter: {apart:.1e} apart"
    return worst, why


def truth_of(question: Question) -> Outputs:
    """The outputs of the question as the interpreter computes them in float64.

    :raises BackendError: it does not run the model.
    """
    prepared = in_float64(question.model, question.wrt)
    return prepared.run(question.at, tuple(question.cotangents))


def _line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None and not isinstance(error, RefgradError) else error
    return " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__


class Erf(OpRun):
    """In double: onnx.reference computes it in float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x),)


class Gelu(OpRun):
    """x·Φ(x), or its approximation by tanh: onnx.reference runs the body, and that with its own Erf."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str) -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (x / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / np.sqrt(2))),)


class GlobalLpPool(OpRun):
    """(Σ |x|^p)^(1/p) over the axes behind the second: onnx.reference has none."""

    op_domain = ""

    def _run(self, x: np.ndarray, p: int) -> tuple[np.ndarray]:
        return (np.sum(np.abs(x) ** p, axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class AffineGrid(OpRun):
    """θ·(x, y, 1) at the points of a grid over [−1, 1]: in double, where onnx.reference uses float32."""

    op_domain = ""

    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int) -> tuple[np.ndarray]:
        spans = [np.linspace(-1, 1, n) if align_corners else (2 * np.arange(n) + 1) / n - 1 for n in size[2:].tolist()]
        points = np.stack([*np.meshgrid(*spans, indexing="ij")[::-1], np.ones(size[2:])], axis=-1)
        return (np.einsum("...k,njk->n...j", points, theta),)


class MaxRoiPool(OpRun):
    """The largest elements of a grid of cells over each region, its corners rounded: onnx.reference has none."""

    op_domain = ""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: Sequence[int], spatial_scale: float
    ) -> tuple[np.ndarray]:
        made = np.zeros((len(rois), x.shape[1], *pooled_shape))
        for k, (image, *corners) in enumerate(rois):
            left, top, right, bottom = (math.floor(c * spatial_scale + 0.5) for c in corners)
            spans = [
                _cells(begin, end, count, size)
                for begin, end, count, size in zip((top, left), (bottom, right), pooled_shape, x.shape[2:], strict=True)
            ]
            for (i, rows), (j, columns) in itertools.product(*map(enumerate, spans)):
                cell = x[int(image), :, slice(*rows), slice(*columns)]
                if cell.size:
                    made[k, :, i, j] = cell.max(axis=(1, 2))
        return (made,)


def _cells(begin: int, end: int, count: int, size: int) -> list[tuple[int, int]]:
    """The places, within `size` elements, at which `count` cells from `begin` to `end`, this one included, begin and end."""
    width = max(end - begin + 1, 1) / count
    bounds = [(math.floor(k * width) + begin, math.ceil((k + 1) * width) + begin) for k in range(count)]
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in bounds]


class Scan(OpRun):
    """The graph of a Scan alone: `scan` runs it. onnx.reference's Scan knows no directions and no other axes."""

    op_domain = ""

    def need_context(self) -> bool:
        """It may read what lies around its graph."""
        return True

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        raise NotImplementedError("Scan within the operators of onnx.reference")


OWN: list[Any] = [AffineGrid, Erf, Gelu, GlobalLpPool, MaxRoiPool, Scan]


def _of_packages() -> list[Any]:
    """The forwards that other packages register."""
    return [_implementation(entry) for entry in extensions.FORWARDS.values()]


def _implementation(entry: extensions.Entry) -> type:
    def run(self: OpRun, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        results = entry.function(*inputs, **attributes)
        return results if isinstance(results, tuple) else (results,)

    return type(entry.op_type, (OpRun,), {"op_domain": entry.domain, "_run": run})


@cache
def _narrow_dtypes() -> frozenset[np.dtype[Any]]:
    return frozenset(helper.tensor_dtype_to_np_dtype(kind) for kind in _NARROW)


def execute(node: Any, inputs: Sequence[Any], context: Mapping[str, Any] | None = None) -> Sequence[Any]:
    """The outputs of one node of onnx.reference.

    :param context: the values around it, for a node with subgraphs.
    :raises BackendError: it fails.
    """
    try:
        results: Sequence[Any] = node.run(*inputs) if context is None else node.run(*inputs, context=context)
    except Exception as error:  # its implementations raise whatever NumPy raises
        raise BackendError(f"onnx.reference fails on {node.op_type}: {_line(error)}.") from error
    return results


def _needed(nodes: Sequence[Any], outputs: Sequence[str]) -> list[Any]:
    """The nodes that `outputs` depend on. Those with subgraphs keep all before them: they may read any."""
    needed, kept = set(outputs), []
    everything = False
    for node in reversed(nodes):
        if everything or not needed.isdisjoint(node.output):
            everything |= node.need_context()
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]


def in_bodies(model: ModelProto) -> ModelProto:
    """A copy of the model with bodies in the place of its functions and of the operators of ours."""
    made = ModelProto()
    made.CopyFrom(model)
    left: list[str] | None = None
    while True:
        if made.functions:
            made = inline_functions(made)
        ours = [qualified(node) for node in made.graph.node if (node.domain, node.op_type) in DEFINITIONS]
        if not ours or ours == left:
            return made
        left = ours
        graph = infer(made)
        found = {}
        for value in (*graph.value_info, *graph.input, *graph.output):
            kind, shape = type_of(value)
            found[value.name] = kind, None if shape is None else len(shape)
        call_functions(made, found)


def _expanded(model: ModelProto, kept: Collection[str]) -> ModelProto:
    """The model with the schema's body in the place of each operator that has one and is not kept."""
    left: list[str] | None = None
    while True:
        versions = versions_of(model)
        nodes = [n for n in model.graph.node if n.op_type not in kept and _has_body(n, versions)]
        if not nodes or [node.op_type for node in nodes] == left:
            return model
        left = [node.op_type for node in nodes]
        graph = native.infer_shapes(model).graph
        types = {value.name: value.type for value in (*graph.value_info, *graph.input, *graph.output)}
        types |= {t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in graph.initializer}
        for number, node in enumerate(nodes):
            if all(name in types for name in node.input if name):
                _call_body(model, node, [types.get(name, TypeProto()) for name in node.input], number)
        model = inline_functions(model)
        widen(model.graph, versions_of(model))


def _schema_of(node: NodeProto, versions: Mapping[str, int]) -> Any:
    """The schema of a node's operator, None where onnx has none. (The stubs lack its function bodies.)"""
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = versions.get(domain, 1)
    return onnx.defs.get_schema(node.op_type, version, domain) if onnx.defs.has(node.op_type, version, domain) else None


def _has_body(node: NodeProto, versions: Mapping[str, int]) -> bool:
    schema = _schema_of(node, versions)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def _call_body(model: ModelProto, node: NodeProto, types: Sequence[TypeProto], number: int) -> None:
    """Make `node` a call of its schema's body, which `model` gets as a function."""
    versions = versions_of(model)
    schema = _schema_of(node, versions)
    given = {attribute.name for attribute in node.attribute}
    node.attribute.extend(a for name, a in default_attributes(schema).items() if name not in given)
    body = onnx.FunctionProto()
    if schema.has_function:
        body.CopyFrom(schema.function_body)
    else:
        body.CopyFrom(native.function_of(schema, node, types))
    body.domain, body.name = INLINED, f"{node.op_type}_{number}"
    for imported in body.opset_import:  # where a body means something else in another opset, its outputs tell
        imported.version = versions.get(imported.domain, imported.version)
    model.functions.append(body)
    import_domain(model, INLINED)
    node.domain, node.op_type = body.domain, body.name


def widen(graph: GraphProto, opsets: Mapping[str, int]) -> None:
    """Make every float type, constant and Cast of a graph double, in place."""
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        _widen_type(value.type)
    for tensor in graph.initializer:
        if tensor.data_type in _NARROW:
            tensor.CopyFrom(numpy_helper.from_array(_DOUBLE.tensor(tensor), tensor.name))
    for sparse in graph.sparse_initializer:
        wide = _DOUBLE.array(array_of(sparse.values))
        sparse.values.CopyFrom(numpy_helper.from_array(wide, sparse.values.name))
    for node in graph.node:
        _widen_node(node, opsets)


def _widen_type(kind: TypeProto) -> None:
    match kind.WhichOneof("value"):
        case "tensor_type":
            if kind.tensor_type.elem_type in _NARROW:
                kind.tensor_type.elem_type = onnx.TensorProto.DOUBLE
        case "sequence_type":
            _widen_type(kind.sequence_type.elem_type)
        case "optional_type":
            _widen_type(kind.optional_type.elem_type)


def _widen_node(node: NodeProto, opsets: Mapping[str, int]) -> None:
    if node.op_type == "Constant" and not node.domain:
        for attribute in node.attribute:
            if attribute.name in ("value_float", "value_floats"):
                value = np.array(helper.get_attribute_value(attribute), np.float64)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(value)))
            elif attribute.name == "value" and attribute.t.data_type in _NARROW:
                attribute.t.CopyFrom(numpy_helper.from_array(_DOUBLE.tensor(attribute.t)))
        return
    wide = _DOUBLE.node(node, _schema_of(node, opsets))
    if wide is not node:
        node.CopyFrom(wide)
    for attribute in node.attribute:
        if (
            attribute.name == "stash_type"
        ):  # bodies and implementations know float32 alone: its Cast is widened, or there is none
            attribute.i = onnx.TensorProto.FLOAT
        for inner in subgraphs(attribute):
            widen(inner, opsets)

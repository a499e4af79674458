"""A model in complex numbers, node by node: a forward that shares nothing with the interpreter, neither kernels nor inlining.

Every float is a double, and complex where an input that moves reaches it: f(x + i·h·u) = f(x) + i·h·f′(x)·u + O(h²). Graphs of
nodes, functions and the bodies of schemas are walked here; the forwards of the oracles compute single nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    helper,
)

from refgrad.conformance.fuzzing.graphs.borders import distance
from refgrad.conformance.oracles.analytic import FORWARDS, KinkError, NotAnalyticError, call, erf
from refgrad.conformance.oracles.program import OWN
from refgrad.errors import BackendError, RefgradError
from refgrad.protos import native
from refgrad.protos.external import array_of

FLOATS = frozenset(
    {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.UNDEFINED}
)
_MOST_STEPS = 64


class NotEvaluatedError(Exception):
    """The evaluator has no forward for something in the model, or the model fails at this point."""


def wide(value: Any) -> Any:
    """A value with every narrower float a double."""
    if isinstance(value, list):
        return [wide(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        if value.dtype.kind == "f" or value.dtype.name == "bfloat16":
            return value.astype(np.float64)
    return value


class Evaluator:
    """Runs the nodes of a model of given opsets and functions.

    `margin` is the smallest distance of any value so far to where an operator has no derivative, or jumps.
    """

    def __init__(self, versions: Mapping[str, int], functions: Sequence[FunctionProto] = ()) -> None:
        self.versions = dict(versions)
        self.functions = {(function.domain, function.name): function for function in functions}
        self.margin = math.inf
        self._made: dict[int, tuple[NodeProto, Any]] = {}
        self._bodies: dict[tuple[Any, ...], FunctionProto] = {}

    def graph(self, graph: GraphProto, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every value of a graph by name, with the given values."""
        values = {"": None, **given}
        for tensor in graph.initializer:
            if tensor.name not in given:
                values[tensor.name] = wide(array_of(tensor))
        for node in graph.node:
            self.node(node, values, self.versions)
        return values

    def node(self, node: NodeProto, values: dict[str, Any], versions: Mapping[str, int]) -> None:
        """Compute a node and put its outputs into `values`.

        :raises UnknownError: nobody knows its forward here, or it fails.
        :raises KinkError: it has no derivative here.
        """
        inputs = [values[name] for name in node.input]
        try:
            results = self._results(node, inputs, values, versions)
        except (BackendError, NotAnalyticError, RefgradError, ValueError, TypeError, IndexError, KeyError) as error:
            raise NotEvaluatedError(f"{node.op_type}: {error}") from error
        except (RuntimeError, AttributeError, NotImplementedError, ZeroDivisionError, OverflowError) as error:
            raise NotEvaluatedError(f"{node.op_type}: {type(error).__name__} {error}") from error
        for name, value in zip(node.output, results, strict=False):
            if name:
                values[name] = value

    def _results(
        self, node: NodeProto, inputs: list[Any], values: dict[str, Any], versions: Mapping[str, int]
    ) -> Sequence[Any]:
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            return self._call(function, node, inputs)
        own = _STRUCTURES.get(node.op_type)
        if own is not None and not node.domain:
            return own(self, _Node(node), inputs, values)
        simple = _SIMPLE.get(node.op_type)
        if simple is not None and not node.domain:
            return (simple(self, _Node(node), *inputs),)
        if node.op_type not in _DIRECT and (body := self._body(node, inputs, versions)) is not None:
            return self._call(body, node, inputs)
        step = self._step(node, versions)
        self.margin = min(self.margin, distance(step, [_real(x) for x in inputs]))
        still = node.op_type in FORWARDS and not any(map(_is_complex, inputs))
        results = call(step, [_complex(x) for x in inputs] if still else inputs)
        if still:  # one forward for what moves and what does not
            results = [_real(result) for result in results]
        if node.op_type == "LayerNormalization" and np.shape(results[0]) != np.shape(inputs[0]):
            raise NotEvaluatedError("LayerNormalization whose scale is larger than its input")
        if node.op_type == "Gemm" and any(np.ndim(x) != 2 for x in inputs[:2]):
            raise NotEvaluatedError("Gemm of an operand that is not a matrix")
        if (
            node.op_type.startswith("Reduce")
            and not np.ndim(inputs[0])
            and any(a is not None and np.size(a) for a in inputs[1:])
        ):
            raise NotEvaluatedError("a reduction of a scalar along an axis")
        moving = any(_is_float(x) for x in inputs)
        for result in results:
            narrow = getattr(result, "dtype", None) in (np.float32, np.float16, np.complex64)
            if narrow and moving:
                raise NotEvaluatedError(f"onnx.reference computes {node.op_type} in {result.dtype}")
        return [wide(result) for result in results]

    def _step(self, node: NodeProto, versions: Mapping[str, int]) -> Any:
        """The node as onnx.reference has it, with its attributes."""
        found = self._made.get(id(node))
        if found is None:
            kept = NodeProto()
            kept.CopyFrom(node)
            for attribute in kept.attribute:
                if attribute.name == "stash_type":
                    attribute.i = TensorProto.FLOAT
            formals = [helper.make_value_info(name, TypeProto()) for name in dict.fromkeys(node.input) if name]
            graph = helper.make_graph([kept], "one", formals, [])
            opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
            model = helper.make_model(graph, opset_imports=opsets)
            try:
                made = native.reference(model, OWN).rt_nodes_[0]
            except Exception as error:  # whatever its constructors raise
                raise NotEvaluatedError(f"onnx.reference does not know {node.op_type}: {error}") from error
            found = self._made[id(node)] = node, made
        return found[1]

    def _call(self, function: FunctionProto, node: NodeProto, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a function, whose nodes get the attributes of the call."""
        given = {a.name: a for a in function.attribute_proto}
        given |= {a.name: a for a in node.attribute}
        versions = {entry.domain: entry.version for entry in function.opset_import} or self.versions
        inner: dict[str, Any] = {"": None, **dict.fromkeys(function.input)}
        inner |= dict(zip(function.input, inputs, strict=False))
        for one in function.node:
            kept = NodeProto()
            kept.CopyFrom(one)
            substitute(kept, given)
            self.node(kept, inner, versions)
        return [inner[name] for name in function.output]

    def _body(self, node: NodeProto, inputs: Sequence[Any], versions: Mapping[str, int]) -> FunctionProto | None:
        """The body of a schema as a function, where there is one."""
        version = versions.get("", 1)
        if node.domain or not onnx.defs.has(node.op_type, version):
            return None
        schema: Any = onnx.defs.get_schema(node.op_type, version)  # whose stub lacks the function bodies
        if not schema.has_function and not schema.has_context_dependent_function:
            return None
        kinds = [_type_of(x) for x in inputs]
        written = node.SerializeToString()
        key = (written, version, *(kind.SerializeToString() for kind in kinds))
        if key not in self._bodies:
            body = FunctionProto()
            if schema.has_function:
                body.CopyFrom(schema.function_body)
            else:
                body.CopyFrom(native.function_of(schema, node, kinds))
            named = {a.name for a in node.attribute}
            for name, attribute in schema.attributes.items():
                if name not in named and attribute.default_value.type:
                    body.attribute_proto.append(attribute.default_value)
            for imported in body.opset_import:
                imported.version = version
            self._bodies[key] = body
        return self._bodies[key]


def substitute(node: NodeProto, given: Mapping[str, AttributeProto]) -> None:
    """Put what a call gives in the place of every reference to an attribute of the function."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            found = given.get(attribute.ref_attr_name)
            if found is None:
                continue
            made = AttributeProto()
            made.CopyFrom(found)
            made.name = attribute.name
            kept.append(made)
            continue
        if attribute.type == AttributeProto.GRAPH:
            for inner in attribute.g.node:
                substitute(inner, given)
        kept.append(attribute)
    copies = [AttributeProto.FromString(attribute.SerializeToString()) for attribute in kept]
    del node.attribute[:]
    node.attribute.extend(copies)


def _is_float(x: Any) -> bool:
    if isinstance(x, list):
        return any(map(_is_float, x))
    return getattr(x, "dtype", None) in (np.float64, np.complex128)


def _is_complex(x: Any) -> bool:
    if isinstance(x, list):
        return any(map(_is_complex, x))
    return getattr(x, "dtype", None) == np.complex128


def _complex(x: Any) -> Any:
    return x.astype(np.complex128) if getattr(x, "dtype", None) == np.float64 else x


def _real(x: Any) -> Any:
    if isinstance(x, list):
        return [_real(item) for item in x]
    return x.real if getattr(x, "dtype", None) == np.complex128 else x


def _type_of(x: Any) -> TypeProto:
    if x is None:
        return TypeProto()
    dtype = np.dtype(np.float64) if x.dtype == np.complex128 else x.dtype
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), x.shape)


class _Node:
    """The attributes of a node by name."""

    def __init__(self, node: NodeProto) -> None:
        self.proto = node
        self.given = {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def get(self, name: str, default: Any = None) -> Any:
        found = self.given.get(name)
        return default if found is None else found


def _scalar(x: Any) -> Any:
    return np.asarray(_real(x)).reshape(-1)[0]


def _run(evaluator: Evaluator, graph: GraphProto, fed: Sequence[Any], around: Mapping[str, Any]) -> list[Any]:
    formals = dict(zip((value.name for value in graph.input), fed, strict=True))
    values = dict(around)
    for tensor in graph.initializer:
        values[tensor.name] = wide(array_of(tensor))
    values |= formals
    for node in graph.node:
        evaluator.node(node, values, evaluator.versions)
    return [values[value.name] for value in graph.output]


def _if(evaluator: Evaluator, node: _Node, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
    return _run(evaluator, node.get("then_branch" if _scalar(inputs[0]) else "else_branch"), (), values)


def _loop(evaluator: Evaluator, node: _Node, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
    most, going, *state = (*inputs, None)[: max(len(inputs), 2)]
    body = node.get("body")
    going, rows = going is None or bool(_scalar(going)), list[list[Any]]()
    while going and (most is None or len(rows) < int(_scalar(most))):
        if len(rows) > _MOST_STEPS:
            raise NotEvaluatedError("a Loop of many steps")
        again, *results = _run(evaluator, body, (np.array(len(rows)), np.array(True), *state), values)
        state, going = results[: len(state)], bool(_scalar(again))
        rows.append(results[len(state) :])
    return [*state, *_stacks(rows, body.output[1 + len(state) :])]


def _scan(evaluator: Evaluator, node: _Node, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
    body, first = node.get("body"), len(inputs) - node.get("num_scan_inputs")
    state, made = list(inputs[:first]), len(node.get("body").output) - first
    axes = node.get("scan_input_axes") or [0] * (len(inputs) - first)
    back = node.get("scan_input_directions") or [0] * (len(inputs) - first)
    slices = [np.moveaxis(x, a, 0)[:: -1 if b else 1] for x, a, b in zip(inputs[first:], axes, back, strict=True)]
    if len({len(x) for x in slices}) != 1:
        raise NotEvaluatedError("a Scan of inputs of several lengths")
    rows = []
    for step in range(len(slices[0])):
        results = _run(evaluator, body, (*state, *(x[step, ...] for x in slices)), values)
        state = results[:first]
        rows.append(results[first:])
    stacks = _stacks(rows, body.output[first:])
    axes = node.get("scan_output_axes") or [0] * made
    back = node.get("scan_output_directions") or [0] * made
    return [*state, *(np.moveaxis(y[:: -1 if b else 1], 0, a) for y, a, b in zip(stacks, axes, back, strict=True))]


def _stacks(rows: Sequence[Sequence[Any]], declared: Sequence[Any]) -> list[np.ndarray]:
    """The rows of each result on one another. If there are none, the declared shape says how large one is."""
    if rows:
        if any(len({np.shape(item) for item in column}) > 1 for column in zip(*rows, strict=True)):
            raise NotEvaluatedError("the steps give several shapes")
        return [np.stack(column) for column in zip(*rows, strict=True)]
    made = []
    for value in declared:
        tensor = value.type.tensor_type
        dims = tensor.shape.dim
        if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in dims):
            raise NotEvaluatedError("no step is made, and no shape is declared")
        dtype = np.float64 if tensor.elem_type in FLOATS else helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        made.append(np.zeros((0, *(dim.dim_value for dim in dims)), dtype))
    return made


def _sequence_map(evaluator: Evaluator, node: _Node, inputs: list[Any], values: dict[str, Any]) -> list[Any]:
    body, rows = node.get("body"), []
    for step in range(len(inputs[0])):
        fed = [x[step] if isinstance(x, list) else x for x in inputs]
        rows.append(_run(evaluator, body, fed, values))
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in body.output]


_STRUCTURES: dict[str, Callable[..., Sequence[Any]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}


def _cast(evaluator: Evaluator, node: _Node, x: Any) -> Any:
    kind = node.get("to")
    if kind in FLOATS:
        return x if _is_float(x) else np.asarray(x).astype(np.float64)
    real = _real(x)
    if _is_float(x) and real.size:
        evaluator.margin = min(evaluator.margin, float(np.min(np.abs(real - np.round(real)))))
    return np.asarray(real).astype(helper.tensor_dtype_to_np_dtype(kind))


def _cast_like(evaluator: Evaluator, node: _Node, x: Any, like: Any) -> Any:
    if _is_float(like):
        return x if _is_float(x) else np.asarray(x).astype(np.float64)
    return np.asarray(_real(x)).astype(like.dtype)


def _constant(evaluator: Evaluator, node: _Node) -> Any:
    for name, value in node.given.items():
        match name:
            case "value":
                return wide(array_of(value))
            case "value_float" | "value_floats":
                return np.array(value, np.float64)
            case "value_int" | "value_ints":
                return np.array(value, np.int64)
    raise NotEvaluatedError("a Constant of another kind")


def _sequence_at(evaluator: Evaluator, node: _Node, sequence: list[Any], position: Any) -> Any:
    return sequence[int(_scalar(position))]


def _sequence_insert(evaluator: Evaluator, node: _Node, sequence: list[Any], x: Any, position: Any = None) -> Any:
    made = list(sequence)
    made.insert(len(made) if position is None else range(len(made) + 1)[_place(position, len(made))], x)
    return made


def _place(position: Any, size: int) -> int:
    found = int(_scalar(position))
    return found + size if found < 0 else found


def _sequence_erase(evaluator: Evaluator, node: _Node, sequence: list[Any], position: Any = None) -> Any:
    made = list(sequence)
    del made[-1 if position is None else int(_scalar(position))]
    return made


def _concat_from_sequence(evaluator: Evaluator, node: _Node, sequence: list[Any]) -> Any:
    axis = node.get("axis")
    return np.stack(sequence, axis) if node.get("new_axis", 0) else np.concatenate(sequence, axis)


def _identity(evaluator: Evaluator, node: _Node, x: Any = None) -> Any:
    return x


def _conv_transpose(evaluator: Evaluator, node: _Node, x: Any, w: Any, bias: Any = None) -> Any:
    """Each element of x adds its kernel to the output; onnx.reference's ConvTranspose knows no bias of groups."""
    rank, group = x.ndim - 2, node.get("group", 1)
    strides, dilations, more = (
        node.get(name) or [default] * rank
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    pads = node.get("pads") or [0] * 2 * rank
    if node.get("auto_pad") or node.get("output_shape"):
        raise NotEvaluatedError("ConvTranspose with an output_shape or auto_pad")
    kernel, per = w.shape[2:], w.shape[1]
    full = [
        max(strides[k] * (x.shape[2 + k] - 1) + (kernel[k] - 1) * dilations[k] + 1 + more[k], 0) for k in range(rank)
    ]
    made = np.zeros((x.shape[0], per * group, *full), np.result_type(x, w))
    inputs = x.shape[1] // group
    for g in range(group):
        part, weights = x[:, g * inputs : (g + 1) * inputs], w[g * inputs : (g + 1) * inputs]
        for place in np.ndindex(*kernel):
            added = np.einsum("ni...,io->no...", part, weights[(slice(None), slice(None), *place)])
            where = tuple(
                slice(
                    place[k] * dilations[k], place[k] * dilations[k] + strides[k] * (x.shape[2 + k] - 1) + 1, strides[k]
                )
                for k in range(rank)
            )
            made[(slice(None), slice(g * per, (g + 1) * per), *where)] += added
    kept = tuple(slice(pads[k], full[k] - pads[k + rank]) for k in range(rank))
    made = made[(slice(None), slice(None), *kept)]
    return made if bias is None else made + bias.reshape(-1, *[1] * rank)


def _resize(evaluator: Evaluator, node: _Node, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    """Axis by axis: a matrix of weights. onnx.reference's Resize is slow, and cubic in float32."""
    mode, where = (node.get(name, default).decode() for name, default in _RESIZED)
    if where not in _COORDINATES or node.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise NotEvaluatedError(f"Resize with {where}")
    axes = [axis % x.ndim for axis in node.get("axes") or range(x.ndim)]
    for k, axis in enumerate(axes):
        size = x.shape[axis]
        length = int(sizes[k]) if sizes is not None else math.floor(size * float(_real(scales)[k]))
        scale = length / size if sizes is not None else float(_real(scales)[k])
        weights = np.zeros((length, size))
        for place in range(length):
            at = _COORDINATES[where](place, scale, size, length, size * scale)
            if mode == "nearest":
                weights[
                    place, _clamped(_NEAREST[node.get("nearest_mode", b"round_prefer_floor").decode()](at), size)
                ] = 1
                continue
            width = min(scale, 1.0) if node.get("antialias", 0) else 1.0
            reach = math.ceil((1 if mode == "linear" else 2) / width) + 1
            taps = range(math.floor(at) - reach, math.floor(at) + reach + 1)
            found = {j: _kernel(mode, abs(j - at) * width, node.get("cubic_coeff_a", -0.75)) for j in taps}
            if node.get("exclude_outside", 0):
                found = {j: weight for j, weight in found.items() if 0 <= j < size}
            for j, weight in found.items():
                weights[place, _clamped(j, size)] += weight / sum(found.values())
        x = np.moveaxis(np.tensordot(weights, np.moveaxis(x, axis, 0), 1), 0, axis)
    return x


def _clamped(index: int, size: int) -> int:
    return min(max(index, 0), size - 1)


def _kernel(mode: str, d: float, a: float) -> float:
    """The weight of a point at a distance: a triangle, or the cubic convolution of Keys (1981)."""
    if mode == "linear":
        return max(1 - d, 0.0)
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a if d < 2 else 0.0


_RESIZED = (("mode", b"nearest"), ("coordinate_transformation_mode", b"half_pixel"))
_COORDINATES: dict[str, Callable[[int, float, int, int, float], float]] = {  # the last: the length before it is rounded
    "half_pixel": lambda i, scale, size, length, width: (i + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda i, scale, size, length, width: (i + 0.5) / scale - 0.5 if length > 1 else 0.0,
    "asymmetric": lambda i, scale, size, length, width: i / scale,
    "align_corners": lambda i, scale, size, length, width: i * (size - 1) / (width - 1) if width != 1 else 0.0,
}
_NEAREST: dict[str, Callable[[float], int]] = {
    "round_prefer_floor": lambda x: math.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: math.floor(x + 0.5),
    "floor": math.floor,
    "ceil": math.ceil,
}


def _grid_sample(evaluator: Evaluator, node: _Node, x: Any, grid: Any) -> Any:
    """Linear and nearest. onnx.reference finds the points in float32."""
    mode, padding = node.get("mode", b"linear").decode(), node.get("padding_mode", b"zeros").decode()
    if "cubic" in mode or _is_complex(grid):
        raise NotEvaluatedError(f"GridSample in mode {mode} along a grid that moves")
    sizes, corners = x.shape[2:], node.get("align_corners", 0)
    at = []
    for size, place in zip(sizes, np.moveaxis(_real(grid), -1, 0)[::-1], strict=True):
        point = (place + 1) / 2 * (size - 1) if corners else ((place + 1) * size - 1) / 2
        low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
        if padding == "reflection":
            span = max(high - low, 1e-300)
            point = high - np.abs((point - low) % (2 * span) - span)
        at.append(np.clip(point, 0, size - 1) if padding == "border" else point)
    result = np.zeros((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
    for corner in np.ndindex(*[1 if mode == "nearest" else 2] * len(sizes)):
        pixels = [np.rint(p) if mode == "nearest" else np.floor(p) + side for p, side in zip(at, corner, strict=True)]
        weight = np.ones(grid.shape[:-1])
        for p, pixel, size in zip(at, pixels, sizes, strict=True):
            weight = weight * (1 if mode == "nearest" else 1 - np.abs(p - pixel))
            weight = np.where((pixel >= 0) & (pixel < size) | (padding != "zeros"), weight, 0)
        inside = [np.clip(p, 0, size - 1).astype(np.int64) for p, size in zip(pixels, sizes, strict=True)]
        for image in range(x.shape[0]):
            result[image] += weight[image] * x[image][(slice(None), *(p[image] for p in inside))]
    return result


def _lrn(evaluator: Evaluator, node: _Node, x: Any) -> Any:
    """onnx.reference rounds α/size to float32."""
    size, alpha = node.get("size"), node.get("alpha", float(np.float32(1e-4)))
    before, after = (size - 1) // 2, size // 2
    channels = x.shape[1]
    near = [np.sum(x[:, max(c - before, 0) : c + after + 1] ** 2, axis=1) for c in range(channels)]
    sums = np.stack(near, axis=1) if near else x
    return x / (node.get("bias", 1.0) + alpha / size * sums) ** node.get("beta", 0.75)


def _gelu(evaluator: Evaluator, node: _Node, x: Any) -> Any:
    """Its body has the constants of the approximation in float32."""
    if node.get("approximate", b"none") == b"tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + erf(np.asarray(x / math.sqrt(2), np.complex128)))


_SIMPLE: dict[str, Callable[..., Any]] = {
    "Resize": _resize,
    "GridSample": _grid_sample,
    "LRN": _lrn,
    "Gelu": _gelu,
    "ConvTranspose": _conv_transpose,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Constant": _constant,
    "SequenceAt": _sequence_at,
    "SequenceInsert": _sequence_insert,
    "SequenceErase": _sequence_erase,
    "SequenceEmpty": lambda evaluator, node: [],
    "SequenceLength": lambda evaluator, node, sequence: np.array(len(sequence), np.int64),
    "SequenceConstruct": lambda evaluator, node, *inputs: list(inputs),
    "ConcatFromSequence": _concat_from_sequence,
    "Identity": _identity,
    "Optional": _identity,
    "OptionalGetElement": _identity,
    "OptionalHasElement": lambda evaluator, node, x=None: np.array(x is not None),
}

# Operators with a body whose forward the oracles know directly.
_DIRECT = frozenset(
    [
        "Celu",
        "Clip",
        "DepthToSpace",
        "Elu",
        "GreaterOrEqual",
        "HardSigmoid",
        "HardSwish",
        "LayerNormalization",
        "LeakyRelu",
        "LessOrEqual",
        "LogSoftmax",
        "PRelu",
        "Range",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceSumSquare",
        "Relu",
        "Selu",
        "Shrink",
        "Softmax",
        "Softplus",
        "Softsign",
        "SpaceToDepth",
        "ThresholdedRelu",
        "CenterCropPad",
    ]
)


def tangent(
    model: ModelProto, at: Mapping[str, Any], direction: Mapping[str, np.ndarray], step: float
) -> tuple[dict[str, Any], dict[str, np.ndarray], float]:
    """The values of a model at a point, the derivatives of its outputs along a direction, and the margin.

    :raises UnknownError: as `Evaluator.node` does.
    :raises KinkError: likewise.
    """
    evaluator = Evaluator({entry.domain: entry.version for entry in model.opset_import}, model.functions)
    given = {name: wide(value) for name, value in at.items()}
    for tensor in model.graph.initializer:
        if tensor.name not in given:
            given[tensor.name] = wide(array_of(tensor))
    for name, u in direction.items():
        moved = np.empty(u.shape, np.complex128)
        moved.real, moved.imag = given[name], step * u
        given[name] = moved
    with np.errstate(all="ignore"):
        values = evaluator.graph(model.graph, given)
    results = {value.name: values[value.name] for value in model.graph.output}
    moves = {name: np.imag(y) / step for name, y in results.items() if not isinstance(y, list) and _is_float(y)}
    return {name: _real(y) for name, y in results.items()}, moves, evaluator.margin


__all__ = ["Evaluator", "KinkError", "NotEvaluatedError", "tangent", "wide"]

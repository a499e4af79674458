"""A model as a list of steps, each of which knows the type and the shape of everything that it reads and writes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from refgrad import traits
from refgrad.errors import InvalidModelError, OptionError, RefgradError, UnknownNameError, choices, did_you_mean
from refgrad.model import native
from refgrad.model.external import array_of
from refgrad.model.implied_sizes import with_way
from refgrad.model.inference.completion import infer_completely
from refgrad.model.inlining.inline import inline_functions
from refgrad.model.reading import is_large, skeleton_of
from refgrad.planning.folding import folded
from refgrad.planning.sizes import axis_name, size_of
from refgrad.protos.traverse import attribute_value, captured, graphs, reads_of
from refgrad.protos.types import dimension, is_container, type_of
from refgrad.ranges import RANGES
from refgrad.reverse.assembly import names_in, primals_in
from refgrad.tables.randomness import may_draw
from refgrad.tables.schemas import find_schema

ANY = "*"  # the size of every dimension without a number
_KINDS = frozenset(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
_FOLDED = 1024  # elements of a value that is followed
_BODIES = {"If": ("then_branch", "else_branch"), "Loop": ("body",), "Scan": ("body",)}


@dataclass(frozen=True, slots=True)
class CostTensor:
    """The element type and the shape of a value."""

    kind: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element; an element of fewer than 8 bits takes a byte."""
        return int(helper.tensor_dtype_to_np_dtype(self.kind).itemsize)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements. The characters of strings are not counted."""
        return self.size * self.itemsize


@contextmanager
def fitting(step: CostStep) -> Iterator[None]:
    """While this lasts the cost of a step is computed, by formulas of inputs that fit together.

    :raises InvalidModelError: a formula fails; the error names the node and the shapes.
    """
    try:
        yield
    except RefgradError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        operator = f"{step.domain}.{step.op_type}" if step.domain else step.op_type
        shapes = ", ".join("unknown" if one is None else str(list(one.shape)) for one in step.given) or "none"
        raise InvalidModelError(
            f"The cost of node {step.name!r} ({operator}) cannot be computed ({type(error).__name__}: {error}). Its inputs "
            f"have the shapes {shapes}. Check that its attributes fit these shapes: a run of the model would fail, too."
        ) from error


@dataclass(frozen=True, slots=True)
class CostStep:
    """A node with everything that its cost depends on.

    `reads` are the values that it and its bodies read. `bodies` are its subgraphs, `trips` says how often
    they run: None where only the run knows. `constants` has the small inputs whose value is known, by position.
    """

    name: str
    domain: str
    op_type: str
    attributes: Mapping[str, Any]
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reads: tuple[str, ...]
    given: tuple[CostTensor | None, ...]
    made: tuple[CostTensor | None, ...]
    constants: Mapping[int, np.ndarray]
    is_random: bool
    bodies: tuple[Program, ...] = ()
    trips: int | None = 1

    @property
    def key(self) -> tuple[str, str]:
        """The domain and the name of the operator."""
        return self.domain, self.op_type


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of a graph. `weights` are its initializers; `constants` are those that no caller can override.

    `types` has every value whose type and shape are known, `values` the small ones that are known, and `unknown` the values
    of which neither is, each with the node that makes it. `captures` are what a body reads of the graph around it.
    """

    steps: tuple[CostStep, ...]
    inputs: Mapping[str, CostTensor | None]
    weights: Mapping[str, CostTensor]
    outputs: tuple[str, ...]
    types: Mapping[str, CostTensor]
    values: Mapping[str, np.ndarray]
    constants: frozenset[str] = frozenset()
    captures: frozenset[str] = frozenset()
    unknown: Mapping[str, str] = field(default_factory=dict)

    def nbytes(self, names: Sequence[str]) -> int:
        """The bytes of these values together; of those that are not known, nothing."""
        return sum(self.types[name].nbytes for name in names if name in self.types)


def program(model: ModelProto, sizes: Mapping[str, int] | None = None) -> Program:
    """The steps of `model`, whose functions are inlined, with the numbers `sizes` for symbols of dimensions.

    A cotangent gets the sizes of its output, if the other sizes imply them.

    :raises OptionError: a symbol of an input has no number, or a size is not a number of elements.
    :raises UnknownNameError: a symbol in `sizes` that no input has.
    """
    apart = {tensor.name: tensor for tensor in model.graph.initializer if is_large(tensor)}
    skeleton = skeleton_of(model, apart)
    if skeleton.functions:
        skeleton = inline_functions(skeleton)
    constants = {tensor.name for tensor in model.graph.initializer}
    if model.ir_version >= 4:
        constants -= {value.name for value in model.graph.input}
    weights = {tensor.name: CostTensor(tensor.data_type, tuple(tensor.dims)) for tensor in model.graph.initializer}
    fed = [value.name for value in model.graph.input if value.name not in constants]
    known = _known_sizes(skeleton.graph, {} if sizes is None else sizes)
    _put(skeleton.graph, known)
    of_outputs: Mapping[str, CostTensor] = {}
    cotangents = {name: output for output, name in names_in(model)[0].items()}
    if any(name in cotangents for name, *_ in _open(skeleton.graph)):
        whole = with_way(model, skeleton)
        _clear_symbols(whole.graph)
        of_outputs = _program(whole, weights, fed, constants, {}).types
        _put_implied(skeleton.graph, known, cotangents, of_outputs)
    _put_rest(skeleton.graph, None if sizes is None else sizes.get(ANY))
    _clear_symbols(skeleton.graph)
    return _program(skeleton, weights, fed, constants, {}, primals=of_outputs)


def _known_sizes(graph: GraphProto, sizes: Any) -> dict[str, int]:
    """The sizes of symbols. A size for all other dimensions is left out.

    :raises OptionError: a size is none, or an input is no tensor of a declared rank.
    """
    if not isinstance(sizes, Mapping):
        raise OptionError(
            f"sizes is a mapping from symbols to numbers, such as {{'N': 32}}, not {reprlib.repr(sizes)}."
        )
    _check(graph, sizes)
    for value in graph.input:
        if is_container(value.type) or not value.type.HasField("tensor_type"):
            raise OptionError(
                f"Input {value.name!r} is not a tensor. Only a run knows how many elements it has, so the cost of the model "
                "cannot be computed."
            )
        if (kind := value.type.tensor_type.elem_type) not in _KINDS:
            raise InvalidModelError(
                f"Input {value.name!r} has the element type {kind}, which onnx {onnx.__version__} does not know. Declare one "
                "of onnx.TensorProto.DataType."
            )
        if not value.type.tensor_type.HasField("shape"):
            raise OptionError(
                f"Input {value.name!r} declares no shape. Declare its dimensions, by names where the sizes are not known."
            )
    return {symbol: size for symbol, size in sizes.items() if symbol != ANY}


def _open(graph: GraphProto) -> Iterator[tuple[str, int, Any]]:
    """The dimensions of inputs that have no number: the input, the axis, and the dimension."""
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not isinstance(dimension(dim), int):
                yield value.name, axis, dim


def _put(graph: GraphProto, known: Mapping[str, int]) -> None:
    """Put the numbers of symbols into the declared shapes, in place."""
    for name, axis, dim in _open(graph):
        size = known.get(axis_name(name, axis), size_of(dimension(dim), known))
        if size is not None:
            dim.Clear()
            dim.dim_value = size
    for inner in graphs(graph):
        for value in (*inner.value_info, *inner.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param") and (size := known.get(dim.dim_param)) is not None:
                    dim.Clear()
                    dim.dim_value = size


def _clear_symbols(graph: GraphProto) -> None:
    """Forget what results declare in symbols, in place: inference tells."""
    for inner in graphs(graph):
        for value in (*inner.value_info, *inner.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param"):
                    dim.Clear()


def _put_implied(
    graph: GraphProto, known: Mapping[str, int], cotangents: Mapping[str, str], types: Mapping[str, CostTensor]
) -> None:
    """Put the sizes of cotangents into the declared shapes, in place, as far as the sizes of their outputs are known."""
    implied = dict(known)
    for name, axis, dim in _open(graph):
        output = types.get(cotangents.get(name, ""))
        symbol = dimension(dim)
        if output is None or len(output.shape) <= axis:
            continue
        if isinstance(symbol, str):
            implied.setdefault(symbol, output.shape[axis])
        else:
            dim.Clear()
            dim.dim_value = output.shape[axis]
    _put(graph, implied)


def _put_rest(graph: GraphProto, size: int | None) -> None:
    """Put one size into every dimension of an input without a number, in place. Without it these are refused.

    :raises OptionError: a dimension has no number. Of several symbols the shortest one is named.
    """
    if size is not None:
        for _, _, dim in _open(graph):
            dim.Clear()
            dim.dim_value = size
    places = [(symbol, name) for name, _, dim in _open(graph) if isinstance(symbol := dimension(dim), str)]
    if places:
        symbol, name = min(places, key=lambda place: len(place[0]))
        unknown = f"The size {symbol!r} of input {name!r} is not known."
        raise OptionError(f"{unknown} Give a number for it: sizes={{{symbol!r}: 32}}.", unknown)
    for name, axis, _ in _open(graph):
        unknown = f"Axis {axis} of input {name!r} has neither a size nor a name."
        raise OptionError(
            f"{unknown} Give a number for it: sizes={{{axis_name(name, axis)!r}: 32}}, or for all such axes: "
            f"sizes={{{ANY!r}: 32}}.",
            unknown,
        )


def _check(graph: GraphProto, sizes: Mapping[str, Any]) -> None:
    symbols: dict[str, None] = {}
    for value in graph.input:
        symbols |= dict.fromkeys(d for d in map(dimension, value.type.tensor_type.shape.dim) if isinstance(d, str))
    axes = {axis_name(name, axis) for name, axis, _ in _open(graph)}
    for symbol, size in sizes.items():
        if RANGES["dim"].why_not(size):
            raise OptionError(f"sizes: the size of {symbol!r} is {size!r}; it is a whole number, 0 or more.")
        if symbol != ANY and symbol not in symbols and symbol not in axes:
            have = f"The inputs have {choices(symbols)}." if symbols else "No input has a symbol for a size."
            raise UnknownNameError(
                f"sizes: no input has the dimension {symbol!r}.{did_you_mean(symbol, list(symbols))} {have}"
            )


def _program(
    model: ModelProto,
    weights: Mapping[str, CostTensor],
    fed: Sequence[str],
    constants: set[str],
    values: dict[str, np.ndarray],
    captures: frozenset[str] = frozenset(),
    primals: Mapping[str, CostTensor] | None = None,
) -> Program:
    """The steps of a model whose inputs have shapes; `values` are inputs that are known.

    :param primals: types of values that the model may lack, and whose cotangents it computes.
    """
    opsets = {"" if one.domain == "ai.onnx" else one.domain: one.version for one in model.opset_import}
    inferred = infer_completely(model)
    types: dict[str, CostTensor] = dict(weights)
    for value in (*model.graph.input, *inferred.input, *inferred.value_info, *inferred.output):
        tensor = _tensor(value)
        if tensor is not None and value.name not in weights:
            types[value.name] = tensor
    for initializer in model.graph.initializer:
        types[initializer.name] = CostTensor(initializer.data_type, tuple(initializer.dims))
        if math.prod(initializer.dims) <= _FOLDED and initializer.name in constants:
            values[initializer.name] = array_of(initializer)
    for sparse in model.graph.sparse_initializer:
        types[sparse.values.name] = CostTensor(sparse.values.data_type, tuple(sparse.dims))
    primals_of = {value.name: primals_in(value) for value in (*model.graph.value_info, *model.graph.output)}
    steps: list[CostStep] = []
    unknown: dict[str, str] = {}
    for node in model.graph.node:
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = {a.name: attribute_value(a) for a in node.attribute if a.type != a.GRAPH}
        given = tuple(types.get(name) for name in node.input)
        _fill(node, domain, opsets, attributes, types, values)
        bodies, trips = _bodies(node, model, types, values, given)
        for body in bodies:
            for name, known in zip(node.output, _of_body(node, body, trips), strict=False):
                if name and known is not None:
                    types.setdefault(name, known)
            unknown.update(body.unknown)
        for name in (name for name in node.output if name and name not in types):
            like = (types.get(primal) or (primals or {}).get(primal) for primal in primals_of.get(name, ()))
            if (known := next(filter(None, like), None)) is not None:
                types[name] = known  # a cotangent has the type and the shape of its primal
        label = node.name or next(filter(None, node.output), node.op_type)
        unknown.update((name, label) for name in node.output if name and name not in types)
        if trips is None:
            unknown[f"the rounds of {label}"] = label
        steps.append(
            CostStep(
                label,
                domain,
                node.op_type,
                attributes | _defaults(node.op_type, domain, opsets, attributes),
                opsets.get(domain, 1),
                tuple(node.input),
                tuple(node.output),
                tuple(dict.fromkeys(reads_of(node))),
                given,
                tuple(types.get(name) for name in node.output),
                {k: values[name] for k, name in enumerate(node.input) if name in values},
                may_draw(node),
                bodies,
                trips,
            )
        )
    return Program(
        tuple(steps),
        {name: types.get(name) for name in fed},
        {**weights},
        tuple(value.name for value in model.graph.output),
        types,
        values,
        frozenset(constants),
        captures,
        unknown,
    )


def _tensor(value: ValueInfoProto) -> CostTensor | None:
    kind, shape = type_of(value)
    if kind not in _KINDS or shape is None:
        return None
    sizes = [dim for dim in shape if isinstance(dim, int)]
    return CostTensor(kind, tuple(sizes)) if len(sizes) == len(shape) else None


def _defaults(op_type: str, domain: str, opsets: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, Any]:
    schema = _schema(op_type, domain, opsets)
    if schema is None:
        return {}
    found = {}
    for name, attribute in schema.attributes.items():
        if name not in given and attribute.default_value.type:
            found[name] = attribute_value(attribute.default_value)
    return found


def _schema(op_type: str, domain: str, opsets: Mapping[str, int]) -> Any:
    """The schema of an operator; None if the imported version has none, as in an invalid model."""
    try:
        return find_schema(op_type, domain, opsets.get(domain, 1))
    except onnx.defs.SchemaError:
        return None


def _fill(
    node: NodeProto,
    domain: str,
    opsets: Mapping[str, int],
    attributes: Mapping[str, Any],
    types: dict[str, CostTensor],
    values: dict[str, np.ndarray],
) -> None:
    """Follow small values, which may be shapes; and through them the shapes that inference does not find."""
    if domain:
        return
    if any(name and name not in types for name in node.output):
        _infer_again(node, domain, opsets, types, values)
    name = node.output[0] if len(node.output) == 1 else ""
    if name not in types or types[name].size > _FOLDED:
        return
    found = _size(node, attributes, types.get(node.input[0])) if node.op_type in traits.SIZES else None
    if found is None:
        found = folded(node, opsets, [values.get(given) for given in node.input])
    if found is not None:
        values[name] = found


def _size(node: NodeProto, attributes: Mapping[str, Any], tensor: CostTensor | None) -> np.ndarray | None:
    """The value of Shape or Size, which follows from the shape of its input alone."""
    if tensor is None:
        return None
    sizes = tensor.size if node.op_type == "Size" else tensor.shape[attributes.get("start", 0) : attributes.get("end")]
    return np.array(sizes, np.int64)


def _infer_again(
    node: NodeProto,
    domain: str,
    opsets: Mapping[str, int],
    types: dict[str, CostTensor],
    values: Mapping[str, np.ndarray],
) -> None:
    """Ask onnx once more about a node, with the values that are known by now."""
    schema = _schema(node.op_type, domain, opsets)
    if schema is None or any(name and name not in types for name in node.input):
        return
    kinds = {name: helper.make_tensor_type_proto(types[name].kind, types[name].shape) for name in node.input if name}
    known = {name: values[name] for name in node.input if name in values}
    for name in filter(None, node.input):
        if not types[name].size:  # what waits for others: it is empty, but not folded
            known[name] = np.zeros(types[name].shape, helper.tensor_dtype_to_np_dtype(types[name].kind))
    data = {name: numpy_helper.from_array(value) for name, value in known.items()}
    try:
        made = native.infer_node_outputs(schema, node, kinds, data, opsets)
    except native.InferenceError:
        return
    for name, kind in made.items():
        tensor = _tensor(ValueInfoProto(name=name, type=kind))
        if tensor is not None:
            types.setdefault(name, tensor)


def _bodies(
    node: NodeProto,
    model: ModelProto,
    types: Mapping[str, CostTensor],
    values: Mapping[str, np.ndarray],
    given: Sequence[CostTensor | None],
) -> tuple[tuple[Program, ...], int | None]:
    """The bodies of a node, and how often they run."""
    attributes = {a.name: a.g for a in node.attribute if a.type == a.GRAPH}
    if not attributes:
        return (), 1
    formal: list[CostTensor | None] = []
    trips: int | None = 1
    if node.op_type == "Loop":
        formal = [CostTensor(TensorProto.INT64, ()), CostTensor(TensorProto.BOOL, ()), *given[2:]]
        trips = _loop_trips(node, attributes["body"], values)
    elif node.op_type == "Scan":
        formal, trips = _scan_inputs(node, given)
    elif node.op_type != "If":  # SequenceMap: as many times as the sequence is long
        trips = None
    return tuple(_body(graph, model, formal, types, values) for graph in attributes.values()), trips


def _loop_trips(node: NodeProto, body: GraphProto, values: Mapping[str, np.ndarray]) -> int | None:
    """The constant number of rounds of a Loop, whose condition does not end it earlier."""
    count = values.get(node.input[0]) if node.input[0] else None
    if count is None:
        return None
    goes_on = body.output[0].name
    passed = {body.input[1].name}
    for inner in body.node:
        if inner.op_type == "Identity" and inner.input[0] in passed:
            passed.update(inner.output)
        elif inner.op_type == "Constant" and goes_on in inner.output:
            return int(count.item())
    start = values.get(node.input[1]) if len(node.input) > 1 and node.input[1] else None
    if goes_on in passed and (start is None or bool(start.item())):
        return int(count.item())
    if goes_on in {tensor.name for tensor in body.initializer} or goes_on in values:
        return int(count.item())
    return None


def _scan_inputs(node: NodeProto, given: Sequence[CostTensor | None]) -> tuple[list[CostTensor | None], int | None]:
    attributes = {a.name: attribute_value(a) for a in node.attribute if a.type != a.GRAPH}
    scanned = int(attributes["num_scan_inputs"])
    axes = attributes.get("scan_input_axes") or [0] * scanned
    states = list(given[: len(given) - scanned])
    trips = None
    for tensor, axis in zip(given[len(given) - scanned :], axes, strict=True):
        if tensor is None or not tensor.shape:
            states.append(None)
            continue
        shape = list(tensor.shape)
        trips = shape.pop(axis)
        states.append(CostTensor(tensor.kind, tuple(shape)))
    return states, trips


def _body(
    graph: GraphProto,
    outer: ModelProto,
    formal: Sequence[CostTensor | None],
    types: Mapping[str, CostTensor],
    values: Mapping[str, np.ndarray],
) -> Program:
    """A body as a program: the values around it that it reads are inputs."""
    model = ModelProto(ir_version=outer.ir_version, opset_import=outer.opset_import)
    model.graph.CopyFrom(graph)
    for value, tensor in zip(model.graph.input, formal, strict=False):
        if tensor is not None:
            value.type.CopyFrom(helper.make_tensor_type_proto(tensor.kind, list(tensor.shape)))
    taken = list(dict.fromkeys(captured(graph)))
    for name in taken:
        kind = TypeProto()
        if name in types:
            kind = helper.make_tensor_type_proto(types[name].kind, list(types[name].shape))
        model.graph.input.append(ValueInfoProto(name=name, type=kind))
    weights = {t.name: CostTensor(t.data_type, tuple(t.dims)) for t in graph.initializer}
    known = {name: values[name] for name in taken if name in values}
    fed = [value.name for value in graph.input]
    return _program(model, weights, fed, {t.name for t in graph.initializer}, known, frozenset(taken))


def _of_body(node: NodeProto, body: Program, trips: int | None) -> list[CostTensor | None]:
    """The tensors that a node with bodies returns, by the types of the outputs of one body."""
    made = [body.types.get(name) for name in body.outputs]
    if node.op_type == "If":
        return made
    if node.op_type == "Loop":
        made = made[1:]
        states = len(node.input) - 2
    elif node.op_type == "Scan":
        states = len(node.input) - next(a.i for a in node.attribute if a.name == "num_scan_inputs")
    else:
        return []
    rows = [
        None if row is None or trips is None else CostTensor(row.kind, (trips, *row.shape)) for row in made[states:]
    ]
    return [*made[:states], *rows]


def refuse_unknown(found: Program) -> None:
    """Refuse a program of which not all shapes are known.

    :raises InvalidModelError: it names the first such value.
    """
    for name, label in found.unknown.items():
        raise InvalidModelError(
            f"The cost of {label!r} is not known before a run: the shape of {name!r} depends on values that are fed, or shape "
            "inference does not know the operator. Declare its shape in the value_info of the graph, or leave that part out "
            "with refgrad.select_model_inputs_outputs."
        )

"""A model as text: what goes in, what each node computes from what, what comes out, one line each."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import TypeVar

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    SparseTensorProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    defs,
    helper,
)

from refgrad.errors import InvalidModelError
from refgrad.escaping import is_printable, printable
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of, is_external
from refgrad.model.reading import read
from refgrad.protos.traverse import captured, subgraphs

T = TypeVar("T")

FEW = 10  # elements of a constant or of an attribute that are printed
_LONG = 60  # characters of a string that are printed
_DEEPEST = 32  # levels; a chain of thousands of nodes must not walk off to the right


@explained
def onnx_text_plot_io(model: ModelProto | str | os.PathLike[str]) -> str:
    """Return the operator sets, inputs, initializers and outputs of `model`, a line for each.

    The layout is as in mlprodict's function of the same name, except for shapes. An unknown dimension is `?` instead of 0, a
    symbolic dimension is its name, and an initializer has its true shape instead of (0,).

    :param model: a model, or the path of one. It is not checked, and its external data is not read.
    :raises InvalidModelError: the model cannot be read.

    >>> import onnx.parser, refgrad
    >>> print(refgrad.onnx_text_plot_io(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N, ?] x) => (float[N, 2] y) <int64[1] axes = {1}> '
    ...     '{ y = Unsqueeze(x, axes) }'
    ... )))
    opset: domain='' version=18
    input: name='x' type=dtype('float32') shape=(N, ?)
    init: name='axes' type=dtype('int64') shape=(1,)
    output: name='y' type=dtype('float32') shape=(N, 2)
    """
    source = read(model, weights=False, sort=False)
    lines = [*_opsets(source.opset_import), *_inputs(source.graph, values=False), *_outputs(source.graph)]
    return "\n".join(map(printable, lines))


@explained
def onnx_simple_text_plot(model: ModelProto | str | os.PathLike[str]) -> str:
    """Return `model` as an indented listing: the lines of `onnx_text_plot_io`, the values of small initializers, the nodes.

    The nodes come in an order in which they can be computed, along chains. The next node is the first one in the model that
    reads a result of the node above and has all its other inputs. If no node does, it is the first one that has all inputs.

    A node is indented one level deeper than the node that it reads from, or than the leftmost of several. A node that reads
    only inputs and initializers starts at the margin. So does a node that reads no result of the node above it, with two
    exceptions: it closes a branch further to the left, or it is on the same level and reads one of the results that the node
    above reads. The indentation ends at 32 levels.

    The domains ai.onnx and com.microsoft are left out, the latter only if ai.onnx has no operator of the same name. `-` is an
    input or output that is left out. Subgraphs are printed below the graph of their node, which calls them G1, G2, ...,
    and local functions below all of it. A name with a control character, such as a line break, is quoted as Python quotes it:
    nothing in a model begins a line of its own.

    Where the listing departs from mlprodict's function of this name: the shapes, as `onnx_text_plot_io` says; every attribute
    is printed; arrays always say their dtype.

    :param model: a model, or the path of one. Nothing is checked, and external data is not read.
    :raises InvalidModelError: the model cannot be read, or a node needs its own result.

    >>> import onnx.parser, refgrad
    >>> print(refgrad.onnx_simple_text_plot(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N] x, float[N] z) => (float[N] y) <float[1] w = {2}> '
    ...     '{ a = Mul(x, w)  b = Elu<alpha = 0.1>(a)  c = Exp(z)  y = Add(b, c) }'
    ... )))
    opset: domain='' version=18
    input: name='x' type=dtype('float32') shape=(N,)
    input: name='z' type=dtype('float32') shape=(N,)
    init: name='w' type=dtype('float32') shape=(1,) -- array([2.], dtype=float32)
    Mul(x, w) -> a
      Elu(a, alpha=0.1) -> b
    Exp(z) -> c
      Add(b, c) -> y
    output: name='y' type=dtype('float32') shape=(N,)
    """
    source = read(model, weights=False, sort=False)
    numbers = count(1)
    lines = [*_opsets(source.opset_import), *_graph(source.graph, numbers)]
    for function in source.functions:
        lines += _function(function, numbers)
    return "\n".join(map(printable, lines))


def shown(name: str) -> str:
    """Return a name for one line. A name with control characters is quoted."""
    return name if is_printable(name) else printable(repr(name))


def kind_of(tensor: int) -> str:
    """Return the name of an element type, or `?` for an unknown number."""
    if tensor == TensorProto.STRING:
        return "string"
    return str(helper.tensor_dtype_to_np_dtype(tensor).name) if tensor in helper.get_all_tensor_dtypes() else "?"


def operator(node: NodeProto) -> str:
    """Return the name of an operator, with its domain if the name alone could mean another operator."""
    bare = node.domain in ("", "ai.onnx") or (node.domain == "com.microsoft" and not defs.has(node.op_type))
    return shown(node.op_type if bare else f"{node.domain}.{node.op_type}")


def values_of(tensor: TensorProto) -> np.ndarray | None:
    """Return the value of a constant, or None if it is external data.

    :raises InvalidModelError: its data does not fit its type and shape.
    """
    return None if is_external(tensor) else array_of(tensor)


def is_small(dims: Iterable[int]) -> bool:
    """Return whether all values of a constant of this shape are printed."""
    return int(np.prod(tuple(dims), dtype=np.float64)) <= FEW


def attributes(node: NodeProto, graphs: Sequence[str] = ()) -> list[str]:
    """Return `name=value` for every attribute, in alphabetical order. `graphs` are the names of its subgraphs."""
    written = {}
    names = iter(graphs)
    for attribute in node.attribute:
        own = [next(names) for _ in subgraphs(attribute)]
        written[attribute.name] = f"{shown(attribute.name)}={_attribute(attribute, own)}"
    return [written[name] for name in sorted(written)]


def _attribute(attribute: AttributeProto, graphs: Sequence[str] = ()) -> str:
    kinds = AttributeProto.AttributeType
    if attribute.ref_attr_name:
        return f"@{shown(attribute.ref_attr_name)}"
    match attribute.type:
        case kinds.FLOAT:
            return str(np.float32(attribute.f))
        case kinds.FLOATS:
            return _list(attribute.floats, lambda value: str(np.float32(value)))
        case kinds.STRING:
            return _string(attribute.s)
        case kinds.STRINGS:
            return _list(attribute.strings, _string)
        case kinds.INT:
            return str(attribute.i)
        case kinds.INTS:
            return _list(attribute.ints, str)
        case kinds.TENSOR:
            return _tensor(attribute.t)
        case kinds.TENSORS:
            return _list(attribute.tensors, _tensor)
        case kinds.SPARSE_TENSOR:
            return _sparse(attribute.sparse_tensor)
        case kinds.SPARSE_TENSORS:
            return _list(attribute.sparse_tensors, _sparse)
        case kinds.TYPE_PROTO:
            return type_of(attribute.tp)
        case kinds.TYPE_PROTOS:
            return _list(attribute.type_protos, type_of)
        case kinds.GRAPH:
            return graphs[0]
        case _:
            return f"[{', '.join(graphs)}]"


def _list(values: Sequence[T], text: Callable[[T], str]) -> str:
    few = ", ".join(text(value) for value in values[:FEW])
    return f"[{few}]" if len(values) <= FEW else f"[{few}, ... {len(values)} in all]"


def _string(value: bytes) -> str:
    text = value.decode(errors="replace")
    return repr(text) if len(text) <= _LONG else f"{text[:_LONG]!r}..."


def _tensor(tensor: TensorProto) -> str:
    value = values_of(tensor) if is_small(tensor.dims) else None
    if value is None:
        return f"{kind_of(tensor.data_type)}{shape_text(tensor.dims)}"
    return np.array2string(value, separator=", ", max_line_width=10**6).replace("\n", "")


def _sparse(tensor: SparseTensorProto) -> str:
    return f"sparse {kind_of(tensor.values.data_type)}{shape_text(tensor.dims)}"


def shape_text(dims: Iterable[object]) -> str:
    """Return a shape as text: `(2, 3)`, `(2,)`, `()`."""
    written = [shown(str(dim)) for dim in dims]
    return f"({written[0]},)" if len(written) == 1 else f"({', '.join(written)})"


def dimension(dim: TensorShapeProto.Dimension, unknown: str) -> int | str:
    """Return the size of a dimension, its name, or `unknown`."""
    return dim.dim_value if dim.HasField("dim_value") else dim.dim_param or unknown


def type_of(kind: TypeProto) -> str:
    """Return the type of a value, for a tensor with its shape."""
    which = kind.WhichOneof("value")
    match which:
        case "tensor_type" | "sparse_tensor_type":
            tensor = kind.tensor_type if which == "tensor_type" else kind.sparse_tensor_type
            known = tensor.HasField("shape")
            shape = shape_text(dimension(dim, "?") for dim in tensor.shape.dim) if known else "?"
            return f"{'' if which == 'tensor_type' else 'sparse '}dtype('{kind_of(tensor.elem_type)}') shape={shape}"
        case "sequence_type":
            return f"sequence of {type_of(kind.sequence_type.elem_type)}"
        case "optional_type":
            return f"optional {type_of(kind.optional_type.elem_type)}"
        case "map_type":
            return f"map from {kind_of(kind.map_type.key_type)} to {type_of(kind.map_type.value_type)}"
        case _:
            return "?"


def _opsets(imports: Iterable[OperatorSetIdProto]) -> Iterator[str]:
    return (f"opset: domain={o.domain!r} version={o.version}" for o in imports)


def _inputs(graph: GraphProto, *, values: bool) -> Iterator[str]:
    for value in graph.input:
        yield f"input: name={value.name!r} type={type_of(value.type)}"
    for tensor in graph.initializer:
        line = f"init: name={tensor.name!r} type=dtype('{kind_of(tensor.data_type)}') shape={shape_text(tensor.dims)}"
        array = values_of(tensor) if values and is_small(tensor.dims) else None
        if array is not None:
            few = np.array2string(array.ravel(), separator=", ", max_line_width=10**6)
            line += f" -- array({few}, dtype={kind_of(tensor.data_type)})"
        yield line
    for sparse in graph.sparse_initializer:
        kind = f"sparse dtype('{kind_of(sparse.values.data_type)}') shape={shape_text(sparse.dims)}"
        yield f"init: name={sparse.values.name!r} type={kind}"


def _outputs(graph: GraphProto) -> Iterator[str]:
    return (f"output: name={value.name!r} type={type_of(value.type)}" for value in graph.output)


def _graph(graph: GraphProto, numbers: Iterator[int]) -> Iterator[str]:
    below: list[tuple[str, GraphProto]] = []
    yield from _inputs(graph, values=True)
    yield from _nodes(graph.node, numbers, below)
    yield from _outputs(graph)
    yield from _below(below, numbers)


def _below(graphs: Iterable[tuple[str, GraphProto]], numbers: Iterator[int]) -> Iterator[str]:
    for title, graph in graphs:
        yield f"subgraph: {title}"
        yield from (f"  {line}" for line in _graph(graph, numbers))


def _function(function: FunctionProto, numbers: Iterator[int]) -> Iterator[str]:
    below: list[tuple[str, GraphProto]] = []
    defaults = (
        f"{shown(a.name)}={_attribute(a, [shown(g.name) for g in subgraphs(a)])}" for a in function.attribute_proto
    )
    parameters = ", ".join([*map(shown, function.input), *map(shown, function.attribute), *defaults])
    name = shown(f"{function.domain}.{function.name}" if function.domain else function.name)
    yield f"function: {name}({parameters}) -> {', '.join(map(shown, function.output))}"
    yield from (f"  {line}" for line in _opsets(function.opset_import))
    yield from (f"  {line}" for line in _nodes(function.node, numbers, below))
    yield from (f"  {line}" for line in _below(below, numbers))


def _nodes(nodes: Sequence[NodeProto], numbers: Iterator[int], below: list[tuple[str, GraphProto]]) -> Iterator[str]:
    """Yield a line for each node. Adds the subgraphs of the nodes to `below`, with their titles."""
    levels: dict[str, int] = {}
    above, read_above, level_above = frozenset[str](), frozenset[str](), 0
    for node, reads in _along_chains(nodes):
        results = frozenset(name for name in reads if name in levels)
        level = min((levels[name] for name in results), default=0)
        beside = level == level_above and not read_above.isdisjoint(results)
        if level >= level_above and above.isdisjoint(reads) and not beside:
            level = 0
        outputs = ", ".join(shown(name) or "-" for name in node.output)
        graphs = []
        for attribute in node.attribute:
            for graph in subgraphs(attribute):
                graphs.append(f"G{next(numbers)}")
                below.append((f"{graphs[-1]}, {shown(attribute.name)} of {operator(node)} -> {outputs}", graph))
        arguments = ", ".join([*(shown(name) or "-" for name in node.input), *attributes(node, graphs)])
        yield f"{'  ' * min(level, _DEEPEST)}{operator(node)}({arguments}) -> {outputs}"
        above, read_above, level_above = frozenset(filter(None, node.output)), results, level
        levels.update(dict.fromkeys(above, level + 1))


def _along_chains(nodes: Sequence[NodeProto]) -> Iterator[tuple[NodeProto, list[str]]]:
    """Yield each node and the names that it reads, in the order that `onnx_simple_text_plot` describes."""
    reads = [
        [*node.input, *(name for a in node.attribute for graph in subgraphs(a) for name in captured(graph))]
        for node in nodes
    ]
    maker: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for name in filter(None, node.output):
            maker.setdefault(name, position)
    readers: list[list[int]] = [[] for _ in nodes]
    waits_for = []
    for position, names in enumerate(reads):
        makers = {maker[name] for name in names if name in maker}
        waits_for.append(len(makers))
        for made in makers:
            readers[made].append(position)
    able = [position for position, missing in enumerate(waits_for) if not missing]
    while able:
        chain = [heapq.heappop(able)]
        while chain:
            placed = chain.pop()
            yield nodes[placed], reads[placed]
            for reader in readers[placed]:
                waits_for[reader] -= 1
            following = [reader for reader in readers[placed] if not waits_for[reader]]
            chain = following[:1]
            for reader in following[1:]:
                heapq.heappush(able, reader)
    for node, missing in zip(nodes, waits_for, strict=True):
        if missing:
            raise InvalidModelError(
                f"Node {node.name!r} ({node.op_type}) cannot be computed: its inputs depend on its own result. "
                "Export the model again."
            )

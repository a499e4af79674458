"""A case: a model, what to feed it, and what to differentiate. The tables in `cases/` are made of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.forward.functions import call_functions
from refgrad.protos import native
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.inlining import inline_functions
from refgrad.protos.walk import versions_of
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.schemas import find_schema
from refgrad.tables.signatures import SIGNATURES

SHAPES = ("static", "symbolic", "unknown")
NODE = "node"  # what the node of a case is called
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """One model to differentiate at one point. `wrt` and `outputs` are as in `refgrad.gradient`.

    `values` says what the feeds are: "smooth" (the model has a derivative there), "kink" (it has none), or "special" (infinite,
    NaN, or so large or small that a result is). `tolerance` is the relative error that needs no explanation, None for what
    the type and the number of nodes explain. `provenance` says where the case comes from.
    """

    name: str
    model: ModelProto
    feeds: Mapping[str, np.ndarray]
    wrt: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    values: str = "smooth"
    tolerance: float | None = None
    provenance: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def operator(self) -> str:
        """What the case is about: "Conv", "com.microsoft.Gelu", or "model" of several nodes and none called `NODE`."""
        return qualified(self.subject) if self.subject is not None else "model"

    @property
    def opset(self) -> int:
        """The version of the operator's domain that the model imports; for a whole model the version of ai.onnx."""
        versions = versions_of(self.model)
        domain = self.operator.rpartition(".")[0]
        return versions.get(domain, versions.get("", 1))

    @property
    def dtype(self) -> str:
        """The type of the first float that is fed, "" where none is."""
        return next((array.dtype.name for array in self.feeds.values() if is_float(array)), "")

    @property
    def subject(self) -> NodeProto | None:
        """The node that the case is about: the one called `NODE`, or the only one. None of several."""
        nodes = [node for node in self.model.graph.node if node.name == NODE] or list(self.model.graph.node)
        return nodes[0] if len(nodes) == 1 else None

    @property
    def node(self) -> NodeProto:
        """The node that a case of `node_case` is about."""
        return next(node for node in self.model.graph.node if node.name == NODE)

    @property
    def static(self) -> bool:
        """Whether every input is declared with its size."""
        tensors = (value.type.tensor_type for value in self.model.graph.input)
        return all(dim.HasField("dim_value") for tensor in tensors for dim in tensor.shape.dim)


def is_float(array: Any) -> bool:
    """Whether an array holds floats that have a derivative: float16, bfloat16, float32 or float64."""
    return isinstance(array, np.ndarray | np.generic) and array.dtype.name in _FLOATS


def qualified(node: NodeProto) -> str:
    """The operator of a node with its domain: "Conv", "com.microsoft.Gelu"."""
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def node_case(
    op_type: str,
    *inputs: np.ndarray | None,
    domain: str = "",
    opset: int = 22,
    outputs: int | Sequence[int] = 1,
    constant: Sequence[str] = (),
    wrt: Sequence[str] | None = None,
    shapes: str = "static",
    name: str = "",
    **attributes: Any,
) -> Case:
    """A case of one node whose inputs are called as in the operator's schema.

    :param inputs: the values fed, None for an absent optional input; those of a variadic input are called `<name>_0`, ...
    :param outputs: how many outputs the node has, or the positions of those that it does not leave out.
    :param constant: the inputs that are initializers and not fed.
    :param wrt: what to differentiate with respect to; by default every float input that is fed.
    :param shapes: how the inputs are declared: "static", "symbolic" (every dimension a symbol), or "unknown" (the node
        reads the inputs through a Reshape to a shape fed at run time, so that not even the rank is known).
    :param attributes: those of the node; one that is called as a parameter above ends in an underscore (`opset_`).
    """
    attributes = {key.removesuffix("_"): value for key, value in attributes.items()}
    schema = find_schema(op_type, domain, opset)
    called = _names(schema, len(inputs))
    fed = {n: v for n, v in zip(called, inputs, strict=True) if v is not None and n not in constant}
    feeds, values, nodes = dict(fed), [], []
    reads = {n: n for n in called}
    for n, array in fed.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        dims = list(array.shape) if shapes == "static" else [f"{n}_{axis}" for axis in range(array.ndim)]
        values.append(helper.make_tensor_value_info(n, kind, dims))
        if shapes == "unknown":
            reads[n], feeds[f"{n}_shape"] = f"{n}_", np.array(array.shape, dtype=np.int64)
            values.append(helper.make_tensor_value_info(f"{n}_shape", TensorProto.INT64, [f"{n}_rank"]))
            empty: dict[str, Any] = (
                {"allowzero": 1} if domain or opset >= 14 else {}
            )  # before, a 0 always meant another size
            nodes.append(helper.make_node("Reshape", [n, f"{n}_shape"], [f"{n}_"], **empty))
    initializers = [
        numpy_helper.from_array(v, n) for n, v in zip(called, inputs, strict=True) if v is not None and n in constant
    ]
    places = range(outputs) if isinstance(outputs, int) else outputs
    produced = [_output_name(schema, k) if k in places else "" for k in range(max(places, default=-1) + 1)]
    read = [reads[n] if v is not None else "" for n, v in zip(called, inputs, strict=True)]
    nodes.append(helper.make_node(op_type, read, produced, name=NODE, domain=domain, **attributes))
    kinds = _output_types(op_type, domain, opset, fed, initializers, called, inputs, produced, attributes)
    results = []
    for n, (element, rank) in kinds.items():
        if rank is None or shapes == "unknown":  # a graph output has a rank: the elements in one row
            nodes.append(helper.make_node("Reshape", [n, "one_row"], [f"{n}_row"]))
            results.append(helper.make_tensor_value_info(f"{n}_row", element, [f"{n}_size"]))
        else:
            results.append(helper.make_tensor_value_info(n, element, [f"{n}_{axis}" for axis in range(rank)]))
    if any(node.input[1:] == ["one_row"] for node in nodes):
        initializers.append(numpy_helper.from_array(np.array([-1]), "one_row"))
    graph = helper.make_graph(nodes, op_type, values, results, initializers)
    imports = [helper.make_opsetid("", opset if domain == "" else _beside(domain))]
    imports += [helper.make_opsetid(domain, opset)] if domain else []
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    fed_shapes = ",".join("none" if v is None else "x".join(map(str, v.shape)) or "scalar" for v in inputs)
    constants = [f"constant={','.join(constant)}"] if constant else []
    title = name or "-".join(
        [op_type, fed_shapes, *(f"{k}={v}" for k, v in attributes.items()), *constants, shapes, f"opset{opset}"]
    )
    return Case(title, model, feeds, tuple(wrt) if wrt is not None else None)


def _beside(domain: str) -> int:
    """The opset of ai.onnx in a model with an operator of another domain: the last that its runtime knows."""
    return 21 if domain == MICROSOFT else 22


def _through_the_body(node: NodeProto, types: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """The types of the outputs of a node whose operator onnx does not know."""
    inputs = [helper.make_value_info(name, kind) for name, kind in types.items()]
    graph = helper.make_graph([node], NODE, inputs, [ValueInfoProto(name=name) for name in node.output])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", _beside(node.domain)), helper.make_opsetid(node.domain, 1)]
    )
    ranks = {n: (t.tensor_type.elem_type, len(t.tensor_type.shape.dim)) for n, t in types.items()}
    others = DEFINITIONS.keys() - {
        (node.domain, node.op_type)
    }  # a body may have such nodes too, some the operator itself
    while not call_functions(model, ranks):
        inlined = inline_functions(model)
        if others.isdisjoint((inner.domain, inner.op_type) for inner in inlined.graph.node):
            break
        model = inlined
    return {value.name: value.type for value in native.infer_shapes(model).graph.output}


def _names(schema: onnx.defs.OpSchema, count: int) -> list[str]:
    names = []
    for position in range(count):
        parameter = schema.inputs[min(position, len(schema.inputs) - 1)]
        if parameter.option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
            names.append(f"{parameter.name}_{position - len(schema.inputs) + 1}")
        else:
            names.append(parameter.name)
    return names


def _output_name(schema: onnx.defs.OpSchema, position: int) -> str:
    parameter = schema.outputs[min(position, len(schema.outputs) - 1)]
    if parameter.option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
        return f"{parameter.name}_{position - len(schema.outputs) + 1}"
    inputs = {p.name for p in schema.inputs}
    return parameter.name if parameter.name not in inputs else f"{parameter.name}_out"


def _output_types(
    op_type: str,
    domain: str,
    opset: int,
    fed: Mapping[str, np.ndarray],
    initializers: Sequence[TensorProto],
    called: Sequence[str],
    inputs: Sequence[np.ndarray | None],
    produced: Sequence[str],
    attributes: Mapping[str, Any],
) -> dict[str, tuple[int, int | None]]:
    """The element type of every output, and its rank where onnx infers one."""
    schema = find_schema(op_type, domain, opset)
    node = helper.make_node(
        op_type, [n if v is not None else "" for n, v in zip(called, inputs, strict=True)], produced
    )
    node.domain = domain
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items() if v is not None)
    types = {
        n: helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(v.dtype), list(v.shape))
        for n, v in fed.items()
    }
    types |= {t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in initializers}
    data = {t.name: t for t in initializers}
    if (domain, op_type) in SIGNATURES:
        signature = SIGNATURES[domain, op_type]
        like = next(types[called[k]].tensor_type.elem_type for k in signature.floats if called[k] in types)
        return {n: (kind or like, None) for n, kind in zip(produced, signature.types, strict=False)}
    if (domain, op_type) in DEFINITIONS:
        inferred = _through_the_body(node, types)
    else:
        inferred = native.infer_node_outputs(schema, node, types, data, {domain: opset})
    result = {}
    for n in filter(None, produced):
        tensor = inferred[n].tensor_type
        result[n] = tensor.elem_type, len(tensor.shape.dim) if tensor.HasField("shape") else None
    return result

"""A case: a model, what to feed it, and what to differentiate. The tables in `cases/` are made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.model import native
from refgrad.model.inlining.defined import call_functions
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.traverse import versions_of
from refgrad.tables import plugins
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.schemas import find_schema
from refgrad.tables.signatures import SIGNATURES

SHAPES = ("static", "symbolic", "unknown")
NODE = "node"  # what the node of a case is called
MODEL = "model"  # the `operator` of a case without one
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """One model to differentiate at one point. `wrt` and `outputs` are as in `refgrad.gradient`.

    `values` says what the feeds are: "smooth" (the model has a derivative there), "kink" (it has none), or "special" (infinite,
    NaN, or so extreme that a result is infinite or NaN). `tolerance` is the relative error that needs no explanation, None for
    what the type and the number of nodes explain. `provenance` says where the case comes from.

    A case that is made by a `Recipe` gets its model, and its feeds unless they are known, when these are first read.
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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # called where the case has no such attribute, or not yet
            if name not in ("model", "feeds") or self.recipe is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            model, feeds = self.recipe.made
            self.__dict__.setdefault("model", model)
            self.__dict__.setdefault("feeds", feeds)
            return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the model if it exists, else the recipe, from which the other process makes it."""
        return {
            name: value for name, value in self.__dict__.items() if name != "_recipe" or "model" not in self.__dict__
        }

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the model, or None if the model was given."""
        return self.__dict__.get("_recipe")

    def changed(self, **changes: Any) -> Case:
        """A copy with other fields. Unlike `dataclasses.replace`, it does not make the model."""
        if changes.keys() & {"model", "feeds"}:
            return replace(self, **changes)
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__ | changes)
        return made

    @property
    def operator(self) -> str:
        """The operator of the case: "Conv", "com.microsoft.Gelu"; or "model" if no single node is the subject."""
        if self.recipe is not None:
            return self.recipe.operator
        return qualified(self.subject) if self.subject is not None else MODEL

    @property
    def opset(self) -> int:
        """The version of the operator's domain that the model imports; for a whole model the version of ai.onnx."""
        if self.recipe is not None:
            return self.recipe.opset
        versions = versions_of(self.model)
        domain = self.operator.rpartition(".")[0]
        return versions.get(domain, versions.get("", 1))

    @property
    def dtype(self) -> str:
        """The type of the first float that is fed, or ""."""
        if self.recipe is not None:
            return self.recipe.dtype
        return first_float(self.feeds)

    @property
    def subject(self) -> NodeProto | None:
        """The node that the case is about: the one called `NODE`, or the only one; else None."""
        nodes = [node for node in self.model.graph.node if node.name == NODE] or list(self.model.graph.node)
        return nodes[0] if len(nodes) == 1 else None

    @property
    def node(self) -> NodeProto:
        """The node that a case of `node_case` is about."""
        return next(node for node in self.model.graph.node if node.name == NODE)

    @property
    def static(self) -> bool:
        """True if every input is declared with its size."""
        if self.recipe is not None:
            return self.recipe.static
        tensors = (value.type.tensor_type for value in self.model.graph.input)
        return all(dim.HasField("dim_value") for tensor in tensors for dim in tensor.shape.dim)


Feeds = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Recipe:
    """A function that makes the model and the feeds of a case, and the properties by which a case is selected before that."""

    make: Callable[[], tuple[ModelProto, Feeds]]
    operator: str
    opset: int
    dtype: str
    static: bool

    @cached_property
    def made(self) -> tuple[ModelProto, Feeds]:
        """The model and the feeds: made once, for all cases of this recipe."""
        return self.make()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone: the other process makes the model again."""
        return {name: value for name, value in self.__dict__.items() if name != "made"}

    def case(self, name: str, feeds: Feeds | None = None, wrt: tuple[str, ...] | None = None) -> Case:
        """The case of this name; its feeds are made with the model where they are not given."""
        case = Case(name, ModelProto(), feeds or {}, wrt)
        del case.__dict__["model"]
        if feeds is None:
            del case.__dict__["feeds"]
        case.__dict__["_recipe"] = self
        return case


def first_float(feeds: Feeds) -> str:
    """The type of the first float, or ""."""
    return next((array.dtype.name for array in feeds.values() if is_float(array)), "")


def is_float(array: Any) -> bool:
    """True if an array holds floats that have a derivative: float16, bfloat16, float32 or float64."""
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

    :param inputs: the values fed, None for an absent optional input; a variadic input's values are called `<name>_0`, ...
    :param outputs: how many outputs the node has, or the positions of those that it does not leave out.
    :param constant: the inputs that are initializers and not fed.
    :param wrt: what to differentiate with respect to; by default every float input that is fed.
    :param shapes: how the inputs are declared: "static", "symbolic" (every dimension a symbol), or "unknown" (the node
        reads the inputs through a Reshape to a shape fed at run time, so that not even the rank is known).
    :param attributes: the node's attributes; add an underscore to a name that is a parameter above (`opset_`).
    """
    plugins.load()
    attributes = {key.removesuffix("_"): value for key, value in attributes.items()}
    node = _Node(op_type, domain, opset, inputs, outputs, tuple(constant), shapes, attributes)
    fed_shapes = ",".join("none" if v is None else "x".join(map(str, v.shape)) or "scalar" for v in inputs)
    constants = [f"constant={','.join(constant)}"] if constant else []
    title = name or "-".join(
        [op_type, fed_shapes, *(f"{k}={v}" for k, v in attributes.items()), *constants, shapes, f"opset{opset}"]
    )
    operator = f"{domain}.{op_type}" if domain else op_type
    recipe = Recipe(node.made, operator, opset, first_float(node.feeds), node.static)
    return recipe.case(title, node.feeds, tuple(wrt) if wrt is not None else None)


@dataclass(frozen=True)
class _Node:
    """The arguments of `node_case`. It makes the model of the case."""

    op_type: str
    domain: str
    opset: int
    inputs: tuple[np.ndarray | None, ...]
    outputs: int | Sequence[int]
    constant: tuple[str, ...]
    shapes: str
    attributes: Mapping[str, Any]

    @cached_property
    def schema(self) -> onnx.defs.OpSchema:
        """The schema of its operator."""
        plugins.load()  # another process may have made the case
        found: onnx.defs.OpSchema = find_schema(self.op_type, self.domain, self.opset)
        return found

    @cached_property
    def called(self) -> list[str]:
        """The names of its inputs, as the schema has them."""
        return input_names(self.schema, len(self.inputs))

    @cached_property
    def fed(self) -> Feeds:
        """The inputs that are fed."""
        named = zip(self.called, self.inputs, strict=True)
        return {n: v for n, v in named if v is not None and n not in self.constant}

    @cached_property
    def feeds(self) -> Feeds:
        """The feeds of the model: its inputs, and with unknown shapes a shape for each of them."""
        shapes = {f"{n}_shape": np.array(array.shape, dtype=np.int64) for n, array in self.fed.items()}
        return {**self.fed, **(shapes if self.shapes == "unknown" else {})}

    @property
    def static(self) -> bool:
        """True if every input is declared with its size."""
        return self.shapes == "static" or not any(array.ndim for array in self.feeds.values())

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the fields alone: a schema cannot be pickled."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def made(self) -> tuple[ModelProto, Feeds]:
        """The model and its feeds."""
        op_type, domain, opset, inputs, called = self.op_type, self.domain, self.opset, self.inputs, self.called
        values, nodes = [], []
        reads = {n: n for n in called}
        for n, array in self.fed.items():
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            dims = list(array.shape) if self.shapes == "static" else [f"{n}_{axis}" for axis in range(array.ndim)]
            values.append(helper.make_tensor_value_info(n, kind, dims))
            if self.shapes == "unknown":
                reads[n] = f"{n}_"
                values.append(helper.make_tensor_value_info(f"{n}_shape", TensorProto.INT64, [f"{n}_rank"]))
                # before opset 14, a 0 always copied the size of the input
                empty: dict[str, Any] = {"allowzero": 1} if domain or opset >= 14 else {}
                nodes.append(helper.make_node("Reshape", [n, f"{n}_shape"], [f"{n}_"], **empty))
        named = list(zip(called, inputs, strict=True))
        initializers = [numpy_helper.from_array(v, n) for n, v in named if v is not None and n in self.constant]
        places = range(self.outputs) if isinstance(self.outputs, int) else self.outputs
        produced = [_output_name(self.schema, k) if k in places else "" for k in range(max(places, default=-1) + 1)]
        read = [reads[n] if v is not None else "" for n, v in named]
        nodes.append(helper.make_node(op_type, read, produced, name=NODE, domain=domain, **self.attributes))
        results = []
        for n, (element, rank) in self._output_types(initializers, produced).items():
            if rank is None or self.shapes == "unknown":  # a graph output has a rank: the elements in one row
                nodes.append(helper.make_node("Reshape", [n, "one_row"], [f"{n}_row"]))
                results.append(helper.make_tensor_value_info(f"{n}_row", element, [f"{n}_size"]))
            else:
                results.append(helper.make_tensor_value_info(n, element, [f"{n}_{axis}" for axis in range(rank)]))
        if any(node.input[1:] == ["one_row"] for node in nodes):
            initializers.append(numpy_helper.from_array(np.array([-1]), "one_row"))
        graph = helper.make_graph(nodes, op_type, values, results, initializers)
        imports = [helper.make_opsetid("", opset if domain == "" else _beside(domain))]
        imports += [helper.make_opsetid(domain, opset)] if domain else []
        return helper.make_model(graph, opset_imports=imports, ir_version=10), self.feeds

    def _output_types(
        self, initializers: Sequence[TensorProto], produced: Sequence[str]
    ) -> dict[str, tuple[int, int | None]]:
        """The element type of every output, and its rank where onnx infers one."""
        read = [n if v is not None else "" for n, v in zip(self.called, self.inputs, strict=True)]
        node = helper.make_node(self.op_type, read, produced)
        node.domain = self.domain
        node.attribute.extend(helper.make_attribute(k, v) for k, v in self.attributes.items() if v is not None)
        types = {
            n: helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(v.dtype), list(v.shape))
            for n, v in self.fed.items()
        }
        types |= {t.name: helper.make_tensor_type_proto(t.data_type, list(t.dims)) for t in initializers}
        if (self.domain, self.op_type) in SIGNATURES:
            signature = SIGNATURES[self.domain, self.op_type]
            like = next(
                types[self.called[k]].tensor_type.elem_type for k in signature.floats if self.called[k] in types
            )
            return {n: (kind or like, None) for n, kind in zip(produced, signature.types, strict=False)}
        if (self.domain, self.op_type) in DEFINITIONS:
            inferred = _through_the_body(node, types)
        else:
            data = {t.name: t for t in initializers}
            inferred = native.infer_node_outputs(self.schema, node, types, data, {self.domain: self.opset})
        result = {}
        for n in filter(None, produced):
            tensor = inferred[n].tensor_type
            result[n] = tensor.elem_type, len(tensor.shape.dim) if tensor.HasField("shape") else None
        return result


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


def input_names(schema: onnx.defs.OpSchema, count: int) -> list[str]:
    """The names of the first inputs of a node, as its schema has them."""
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

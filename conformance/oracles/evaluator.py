"""An evaluator of models in float64, node by node, on onnx.reference.

The evaluator shares neither kernels nor the inlining of functions with refgrad's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TypeProto, ValueInfoProto, helper
from onnx.reference.op_run import OpRun

from refgrad.backends.numpy.registry import default_attributes
from refgrad.conformance.case import qualified
from refgrad.conformance.oracles.operators import OPERATORS
from refgrad.conformance.oracles.widening import DOUBLE, NARROW, schema_of, widen_node
from refgrad.errors import BackendError, RefgradError
from refgrad.model import native
from refgrad.model.inlining.defined import make_function
from refgrad.protos.traverse import subgraphs
from refgrad.protos.types import FLOATS
from refgrad.tables import extensions
from refgrad.tables.definitions import DEFINITIONS, UnsupportedFormError

Call = Callable[[Any, Sequence[Any]], Sequence[Any]]  # (node of onnx.reference, inputs) -> outputs
Run = Callable[[GraphProto, Sequence[Any]], list[Any]]  # (graph, inputs) -> outputs


def execute(node: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs of one node of onnx.reference.

    :raises BackendError: the node fails.
    """
    try:
        results: Sequence[Any] = node.run(*inputs)
    except Exception as error:  # the operators of onnx.reference raise any error of NumPy
        raise BackendError(f"onnx.reference fails on {node.op_type}: {line_of(error)}.") from error
    return results


class Evaluator:
    """Computes the nodes of a model, its functions and the graphs in its nodes. Every float is a double.

    :param versions: the version of each domain that the model imports.
    :param functions: the functions of the model.
    :param call: a function that computes a node of onnx.reference.
    :param kept: operators of ai.onnx that onnx.reference computes as they are. All other operators are computed by the
        function body in their schema, if it has one. None: no operator is computed by the body in its schema.
    :param most_steps: the most steps that a Loop may take.
    """

    def __init__(
        self,
        versions: Mapping[str, int],
        functions: Sequence[FunctionProto] = (),
        call: Call = execute,
        kept: Collection[str] | None = None,
        most_steps: float = math.inf,
    ) -> None:
        self.versions = dict(versions)
        self.steps: list[Any] = []  # the nodes of onnx.reference that were computed
        self.most_steps = most_steps
        self._functions = {(function.domain, function.name): function for function in functions}
        self._call, self._kept = call, kept
        self._implementations = [*OPERATORS, *map(_implementation, extensions.FORWARDS.values())]
        # By the id of the NodeProto. The NodeProto is kept too: otherwise a later one could have the same id.
        self._steps: dict[int, tuple[NodeProto, Any]] = {}
        self._bodies: dict[tuple[Any, ...], FunctionProto] = {}
        self._called: dict[tuple[Any, ...], tuple[FunctionProto, list[NodeProto]]] = {}
        self._within: list[str] = []  # the operators whose bodies are being computed

    def compute(self, nodes: Iterable[NodeProto], known: Mapping[str, Any]) -> dict[str, Any]:
        """The known values, and the values that the nodes compute from them, by name.

        :raises BackendError: onnx.reference does not know a node, fails on a node, or computes a node in a narrower type.
        """
        values = {"": None, **known}
        for node in nodes:
            self.node(node, values)
        return values

    def node(self, node: NodeProto, values: dict[str, Any], versions: Mapping[str, int] | None = None) -> None:
        """Compute a node, and put its outputs into `values`.

        :param versions: the version of each domain; by default the versions that the model imports.
        :raises BackendError: for the same reasons as in `compute`.
        """
        versions = self.versions if versions is None else versions
        try:
            inputs = [values[name] for name in node.input]
            results = self._results(node, inputs, values, versions)
        except (RefgradError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, BackendError):
                raise
            raise BackendError(f"{node.op_type} cannot be computed: {line_of(error)}.") from error
        for name, value in zip(node.output, results, strict=False):
            if name:
                values[name] = value
            if getattr(value, "dtype", None) in _narrow_dtypes():
                raise BackendError(
                    f"onnx.reference computes {node.op_type} in {value.dtype}, but its inputs are in double."
                )

    def step(self, node: NodeProto, versions: Mapping[str, int] | None = None) -> Any:
        """The node of onnx.reference for `node`, with its attributes, in double.

        :raises BackendError: onnx.reference does not know the node.
        """
        found = self._steps.get(id(node))
        if found is None:
            versions = self.versions if versions is None else versions
            wide = NodeProto()
            wide.CopyFrom(node)
            widen_node(wide, versions)
            formals = [helper.make_value_info(name, TypeProto()) for name in dict.fromkeys(node.input) if name]
            opsets = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
            model = helper.make_model(helper.make_graph([wide], "node", formals, []), opset_imports=opsets)
            try:
                [made] = native.reference(model, self._implementations).rt_nodes_
            except Exception as error:  # the constructors of onnx.reference raise errors of many types
                raise BackendError(f"onnx.reference does not take {node.op_type}: {line_of(error)}.") from error
            for name in made.attributes_names_:
                # Defaults are NumPy's float32. Their product with a Python number would be a float32 too.
                if isinstance(value := getattr(made, name, None), np.float32):
                    setattr(made, name, float(value))
            found = self._steps[id(node)] = node, made
            self.steps.append(made)
        return found[1]

    def _results(
        self, node: NodeProto, inputs: list[Any], values: Mapping[str, Any], versions: Mapping[str, int]
    ) -> Sequence[Any]:
        function = self._functions.get((node.domain, node.op_type))
        if function is None and not node.domain and node.op_type in STRUCTURES:
            return self._structure(node, inputs, values, versions)
        if function is None and qualified(node) not in self._within:
            function = self._body(node, inputs, versions)
        if function is not None:
            return self._of_function(function, node, inputs)
        return self._call(self.step(node, versions), inputs)

    def _structure(
        self, node: NodeProto, inputs: list[Any], values: Mapping[str, Any], versions: Mapping[str, int]
    ) -> Sequence[Any]:
        def run(graph: GraphProto, fed: Sequence[Any]) -> list[Any]:
            """The results of a graph of the node. The graph may read the values of the graphs around it."""
            inner = {**values, **initializers(graph)}
            inner |= zip((value.name for value in graph.input), fed, strict=True)
            for one in graph.node:
                self.node(one, inner, versions)
            return [inner[value.name] for value in graph.output]

        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        return STRUCTURES[node.op_type](attributes, inputs, run, self.most_steps)

    def _of_function(self, function: FunctionProto, node: NodeProto, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the function that `node` calls. References to attributes in it get the attributes of `node`."""
        key = id(function), *(a.SerializeToString() for a in node.attribute)
        if key not in self._called:
            given = {a.name: a for a in (*function.attribute_proto, *node.attribute)}
            nodes = [NodeProto.FromString(one.SerializeToString()) for one in function.node]
            for one in nodes:
                substitute(one, given)
            self._called[key] = function, nodes
        versions = {entry.domain: entry.version for entry in function.opset_import} or self.versions
        values: dict[str, Any] = {"": None, **dict.fromkeys(function.input)}
        values |= zip(function.input, inputs, strict=False)
        self._within.append(qualified(node))
        try:
            for one in self._called[key][1]:
                self.node(one, values, versions)
        finally:
            self._within.pop()
        return [values[name] if read else None for name, read in zip(function.output, node.output, strict=False)]

    def _body(self, node: NodeProto, inputs: Sequence[Any], versions: Mapping[str, int]) -> FunctionProto | None:
        """The function body that computes the node, or None if it has none.

        This is refgrad's body for the operator, if refgrad defines the operator. Otherwise it is the body in the node's schema,
        unless the operator is in `kept`.
        """
        is_kept = self._kept is None or qualified(node) in self._kept
        schema = None if is_kept else schema_of(node, versions)
        is_ours = (node.domain, node.op_type) in DEFINITIONS
        if not is_ours and (schema is None or not (schema.has_function or schema.has_context_dependent_function)):
            return None
        types = [_type_of(x) for x in inputs]
        key = (node.SerializeToString(), versions.get("", 1), *(kind.SerializeToString() for kind in types))
        if key not in self._bodies:
            self._bodies[key] = (
                _of_ours(node, types, versions) if is_ours else _of_schema(schema, node, types, versions)
            )
        return self._bodies[key]


def _of_ours(node: NodeProto, types: Sequence[TypeProto], versions: Mapping[str, int]) -> FunctionProto:
    tensors = {name: kind.tensor_type for name, kind in zip(node.input, types, strict=True)}
    known = {name: (tensor.elem_type, len(tensor.shape.dim)) for name, tensor in tensors.items() if name}
    try:
        body = make_function(node, versions, known, node.op_type)
    except UnsupportedFormError as error:
        raise BackendError(f"{node.op_type} has no body: {line_of(error)}.") from error
    assert body is not None
    return body


def _of_schema(schema: Any, node: NodeProto, types: Sequence[TypeProto], versions: Mapping[str, int]) -> FunctionProto:
    body = FunctionProto()
    if schema.has_function:
        known = schema.function_opset_versions
        written = max((v for v in known if v <= versions.get(schema.domain, 1)), default=min(known))
        body.ParseFromString(schema.get_function_with_opset_version(written))
    else:
        body.CopyFrom(native.function_of(schema, node, types))
    body.attribute_proto.extend(default_attributes(schema).values())
    for imported in body.opset_import:  # if the body means something else in this opset, its outputs differ and show it
        imported.version = versions.get(imported.domain, imported.version)
    return body


def substitute(node: NodeProto, given: Mapping[str, AttributeProto]) -> None:
    """Replace every reference to an attribute of a function by the attribute in `given`, in place."""
    kept = []
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                kept.append(AttributeProto.FromString(given[attribute.ref_attr_name].SerializeToString()))
                kept[-1].name = attribute.name
            continue
        for inner in (inner for graph in subgraphs(attribute) for inner in graph.node):
            substitute(inner, given)
        kept.append(AttributeProto.FromString(attribute.SerializeToString()))
    del node.attribute[:]
    node.attribute.extend(kept)


def initializers(graph: GraphProto) -> dict[str, Any]:
    """The initializers of a graph by name, in double."""
    return {tensor.name: DOUBLE.tensor(tensor) for tensor in graph.initializer}


def _type_of(x: Any) -> TypeProto:
    """The type of a value: a double if the value is complex or a power series."""
    if x is None:
        return TypeProto()
    dtype = np.dtype(np.float64) if x.dtype.kind in "cO" else x.dtype
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), x.shape)


# Functions for the nodes that have graphs. Each gets the attributes, the inputs, a function that computes a graph, and the most
# steps of a Loop.


def _if(attributes: Mapping[str, Any], inputs: Sequence[Any], run: Run, most: float) -> list[Any]:
    return run(attributes["then_branch" if _scalar(inputs[0]) else "else_branch"], ())


def _loop(attributes: Mapping[str, Any], inputs: Sequence[Any], run: Run, most: float) -> list[Any]:
    """The results of a Loop: its body is run until the trip count is reached or the condition is False."""
    trips, condition, *state = (*inputs, None)[: max(len(inputs), 2)]
    body, count = attributes["body"], math.inf if trips is None else _scalar(trips)
    going, rows = condition is None or bool(_scalar(condition)), list[list[Any]]()
    while going and len(rows) < count:
        if len(rows) >= most:
            raise BackendError(f"A Loop takes more than {most} steps.")
        again, *results = run(body, (np.array(len(rows)), np.array(True), *state))
        state, going = results[: len(state)], bool(_scalar(again))
        rows.append(results[len(state) :])
    return [*state, *_stacks(rows, body.output[1 + len(state) :])]


def _scan(attributes: Mapping[str, Any], inputs: Sequence[Any], run: Run, most: float) -> list[Any]:
    """The results of a Scan: its body is run once for each slice of the scanned inputs."""
    body, first = attributes["body"], len(inputs) - attributes["num_scan_inputs"]
    state, read, made = list(inputs[:first]), len(inputs) - first, len(body.output) - first

    def setting(name: str, count: int) -> list[int]:
        return attributes.get(f"scan_{name}") or [0] * count

    moved = zip(inputs[first:], setting("input_axes", read), setting("input_directions", read), strict=True)
    slices = [np.moveaxis(x, axis, 0)[:: -1 if back else 1] for x, axis, back in moved]
    rows: list[list[Any]] = []
    for pieces in zip(*slices, strict=True):
        results = run(body, (*state, *map(np.asarray, pieces)))
        state = results[:first]
        rows.append(results[first:])
    stacks = _stacks(rows, body.output[first:])
    placed = zip(stacks, setting("output_axes", made), setting("output_directions", made), strict=True)
    return [*state, *(np.moveaxis(stack[:: -1 if back else 1], 0, axis) for stack, axis, back in placed)]


def _sequence_map(attributes: Mapping[str, Any], inputs: Sequence[Any], run: Run, most: float) -> list[Any]:
    body = attributes["body"]
    rows = [run(body, [x[step] if isinstance(x, list) else x for x in inputs]) for step in range(len(inputs[0]))]
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in body.output]


def _scalar(x: Any) -> Any:
    return np.asarray(x).reshape(-1)[0]


def _stacks(rows: Sequence[Sequence[Any]], declared: Sequence[ValueInfoProto]) -> list[np.ndarray]:
    """The rows of each result, stacked. If there are no rows, a result is empty, and its other axes have the declared sizes."""
    if rows:
        return [np.stack(column) for column in zip(*rows, strict=True)]
    made = []
    for value in declared:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or not all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            raise BackendError("The body runs zero times, and the shapes of its outputs are not declared.")
        is_float = tensor.elem_type in {*FLOATS, onnx.TensorProto.UNDEFINED}
        dtype = np.float64 if is_float else helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        made.append(np.zeros((0, *(dim.dim_value for dim in tensor.shape.dim)), dtype))
    return made


STRUCTURES: Mapping[str, Callable[[Mapping[str, Any], Sequence[Any], Run, float], list[Any]]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
    "SequenceMap": _sequence_map,
}


def _implementation(entry: extensions.Entry) -> type:
    """A class for onnx.reference that computes an operator by the forward function that another package registered."""

    def run(self: OpRun, *inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        results = entry.function(*inputs, **attributes)
        return results if isinstance(results, tuple) else (results,)

    return type(entry.op_type, (OpRun,), {"op_domain": entry.domain, "_run": run})


@cache
def _narrow_dtypes() -> frozenset[np.dtype[Any]]:
    return frozenset(helper.tensor_dtype_to_np_dtype(kind) for kind in NARROW)


def line_of(error: BaseException) -> str:
    """The message of an error, or of its cause, in one line."""
    cause = error.__cause__ if error.__cause__ is not None and not isinstance(error, RefgradError) else error
    return " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__

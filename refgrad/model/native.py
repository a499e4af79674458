"""The one door to onnx's C++: inference, checker, inliner, version converter, parser, printer, and their callers in onnx.

onnx checks few of the numbers in a model. Some make it read memory that is not its own, and the process dies. With others it
does not return. Each function here first refuses models that are known to do this. No other module calls this C++
(`tests/model/test_native.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import onnx
import onnx.checker
import onnx.compose
import onnx.inliner
import onnx.parser
import onnx.printer
import onnx.shape_inference
import onnx.version_converter
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from refgrad.errors import InvalidModelError, RefgradError
from refgrad.model.checks.arity import ARITY_CHECKS, refuse_mismatch, refuse_mismatch_of_body
from refgrad.model.checks.attributes import passed_on, refuse_absurd_attributes_of
from refgrad.model.checks.recursion import refuse_growth, refuse_recursion
from refgrad.model.external import array_of
from refgrad.protos.traverse import every_node, forget_domain, graphs, import_domain, nested, subgraphs, versions_of

R = TypeVar("R")

InferenceError = onnx.shape_inference.InferenceError
ValidationError = onnx.checker.ValidationError
ConvertError = onnx.version_converter.ConvertError
ParseError = onnx.parser.ParseError

_INDEXING = "GatherND"
# The operators whose inference reads the type of an input even if the type is not known. The last one uses a size as an index,
# even if the size is negative.
ASSUMING = frozenset(("DictVectorizer", "EyeLike", "LabelEncoder", "RegexFullMatch", "TreeEnsemble", _INDEXING))
# The inference of Slice ends the process for a negative size. A file can declare one, and some operators make one: those with
# a kernel that is larger than what it slides over, and those that are given sizes, by the place of that input.
_CUTTING = "Slice"
_SIZED = {"Expand": 1, "Pad": 1, "Split": 1, "TopK": 1}
MEASURING = frozenset((_INDEXING, _CUTTING))  # the operators that no negative size may reach
_UNKNOWN = "refgrad.apart.unknown"  # an input whose numbers nobody knows
_APART = "refgrad.apart"  # the domain of a node that onnx would die of, until onnx can infer it
_TENSORS_TYPED = 4  # since this IR version an initializer need not be an input
_NEWEST = 2**31 - 1  # the largest version that onnx takes
_DEEPEST = 1000  # the most brackets within each other in a text
_TEXTS = re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)
_BRACKETS = re.compile(r"[()\[\]{}]")
_WRITTEN = (".onnxtxt", ".onnxtext")  # the names of files in onnx's syntax
_BODIES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def infer_shapes(
    model: ModelProto, *, check_type: bool = False, strict_mode: bool = False, data_prop: bool = False
) -> ModelProto:
    """A copy of `model` with the types and shapes that onnx infers. The options are the same as in `onnx.shape_inference`.

    :param data_prop: onnx writes out each element of a vector; `inference/propagation.py` hides long vectors first.
    :raises InvalidModelError: onnx would not survive the model.
    :raises InferenceError: onnx refuses it.
    """
    used = refuse_unfit(model)
    refuse_growth(model)  # a body is inferred anew for each call
    apart = _to_part(model, used, data_prop)
    asked = _spared(model, apart, data_prop) if apart else model
    inferred: ModelProto = _asked(
        InferenceError, onnx.shape_inference.infer_shapes, asked, check_type, strict_mode, data_prop
    )
    return inferred if asked is model else _together(inferred)


def infer_node_outputs(
    schema: Any,
    node: NodeProto,
    types: Mapping[str, TypeProto],
    data: Mapping[str, TensorProto],
    opsets: Mapping[str, int],
) -> dict[str, TypeProto]:
    """The types of the outputs of `node`, as onnx infers them from the types and the known values of the inputs.

    :param opsets: the imported version by domain.
    :raises InvalidModelError: onnx would not survive the node.
    :raises InferenceError: onnx refuses it, or the type of an input is missing.
    """
    imports = [helper.make_opsetid(domain, number) for domain, number in opsets.items()]
    _refuse_unfit_alone(schema, node)
    if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
        alone = ModelProto(opset_import=imports)
        alone.graph.node.append(node)
        alone.graph.input.extend(helper.make_value_info(name, kind) for name, kind in types.items())
        used = refuse_unfit(alone)
        if _CUTTING in used and _may_cut_less_than_nothing(alone, used, data_prop=False):
            raise InferenceError(f"{_CUTTING} may read a value whose size is negative.")
    for inner in nested([node]):
        is_ready = inner is node and _is_ready(inner, types, known_or_not=True)
        if not is_ready and (inner.op_type in ASSUMING or (inner is node and inner.op_type == _CUTTING)):
            raise InferenceError(f"{inner.op_type} reads a value whose type is not known, or whose size is negative.")
    outputs: dict[str, TypeProto] = _asked(
        InferenceError,
        onnx.shape_inference.infer_node_outputs,
        schema,
        node,
        types,
        data,
        opset_imports=imports,
    )
    return outputs


def check_model(model: ModelProto, *, full_check: bool = False) -> None:
    """Run onnx's checker on `model`; with `full_check` strict inference, too.

    :raises InvalidModelError: onnx would not survive the model.
    :raises ValidationError: the checker refuses it.
    :raises InferenceError: inference refuses it.
    """
    refuse_recursion(model.functions)
    _asked(ValidationError, onnx.checker.check_model, model)
    if full_check:
        infer_shapes(model, check_type=True, strict_mode=True)


def inline_functions(model: ModelProto, only: Iterable[tuple[str, str]] | None = None) -> ModelProto:
    """A copy of `model` with the nodes of functions in place of their calls; `refgrad.model.inlining.inline` does it correctly.

    :param only: domain and name of the functions to inline; all by default.
    :raises InvalidModelError: onnx would not survive the model, or refuses it.
    """
    refuse_unfit(model)
    refuse_growth(model)
    if only is None:
        return _asked(InvalidModelError, onnx.inliner.inline_local_functions, model)
    return _asked(InvalidModelError, onnx.inliner.inline_selected_functions, model, list(only))


def convert_version(model: ModelProto, target: int) -> ModelProto:
    """A copy of `model` in another opset of ai.onnx.

    :raises InvalidModelError: onnx would not survive the model.
    :raises ConvertError: onnx cannot convert it.
    """
    used = refuse_unfit(model)
    refuse_growth(model)
    _refuse_other_types(model)
    apart = _to_part(model, used)
    asked = _spared(model, apart) if apart else model
    converted: ModelProto = _asked(ConvertError, onnx.version_converter.convert_version, asked, target)
    return converted if asked is model else _together(converted)


def merge_models(
    first: ModelProto, second: ModelProto, io_map: Sequence[tuple[str, str]], outputs: Sequence[str]
) -> ModelProto:
    """`second` behind `first`: outputs of the first, as inputs of the second.

    :raises InvalidModelError: onnx would not survive a model.
    :raises ValidationError: the two do not fit each other.
    """
    for model in (first, second):
        refuse_unfit(model)
    return _asked(ValidationError, onnx.compose.merge_models, first, second, io_map=list(io_map), outputs=list(outputs))


def with_prefix(model: ModelProto, prefix: str) -> ModelProto:
    """A copy of `model` in which every name, except the names of the inputs, begins with `prefix`."""
    return onnx.compose.add_prefix(model, prefix, rename_inputs=False)


def parse_model(text: str) -> ModelProto:
    """The model that a text in onnx's syntax describes.

    :raises ParseError: it describes none, or its brackets lie too deep within each other.
    """
    _refuse_depth(text)
    return _asked(ParseError, onnx.parser.parse_model, text)


def parse_graph(text: str) -> GraphProto:
    """The graph that a text in onnx's syntax describes.

    :raises ParseError: it describes none, or its brackets lie too deep within each other.
    """
    _refuse_depth(text)
    return _asked(ParseError, onnx.parser.parse_graph, text)


def load(path: str | os.PathLike[str]) -> ModelProto:
    """The model in a file, without its external data. The suffix of the file says the format.

    :raises OSError: the file cannot be read.
    :raises ParseError, DecodeError and others: it holds no model.
    """
    if Path(path).suffix in _WRITTEN:
        return parse_model(Path(path).read_text(encoding="utf-8"))
    return onnx.load(path, load_external_data=False)


def to_text(written: ModelProto | GraphProto | FunctionProto) -> str:
    """A model, a graph or a function in onnx's syntax."""
    return onnx.printer.to_text(written)


def function_of(
    schema: Any, node: NodeProto, types: Sequence[TypeProto | None], opset: int | None = None
) -> FunctionProto:
    """The body of the operator's schema for `node` with inputs of `types`; a type is None if it is unknown or left out.

    :param opset: the version of ai.onnx to write the body in; the schema's own by default.
    :raises InvalidModelError: onnx would not survive the node.
    :raises InferenceError: there is no body for the node.
    """
    _refuse_unfit_alone(schema, node)
    written = [b"" if kind is None else kind.SerializeToString() for kind in types]
    serialized = node.SerializeToString()
    body = FunctionProto()
    if opset is None:
        body.ParseFromString(_asked(InferenceError, schema.get_context_dependent_function, serialized, written))
    else:
        function = _asked(
            InferenceError, schema.get_context_dependent_function_with_opset_version, opset, serialized, written
        )
        body.ParseFromString(function)
    return body


def reference(model: ModelProto, new_ops: Sequence[Any] | None = None) -> Any:
    """`onnx.reference.ReferenceEvaluator` of `model`.

    :raises InvalidModelError: onnx would not survive the model. What its constructor raises.
    """
    from onnx.reference import ReferenceEvaluator

    refuse_unfit(model)
    return ReferenceEvaluator(model, new_ops=None if new_ops is None else list(new_ops))


def refuse_unfit(model: ModelProto) -> set[str]:
    """Refuse a model that onnx's C++ does not survive: its attributes, numbers of inputs and outputs, and bodies.

    :return: the operators of the model, its functions included.
    :raises InvalidModelError: the model is refused; the error names the node.
    """
    refuse_recursion(model.functions)
    passed = passed_on(model)
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    used: set[str] = set()
    for nodes, opsets in _scopes(model):
        known: dict[tuple[str, str], _Facts] = {}
        pending = [nodes]
        while pending:
            for node in pending.pop():
                key = node.domain, node.op_type
                facts = known.get(key)
                if facts is None:
                    facts = known[key] = _facts(*key, opsets.get(key[0] if key[0] != "ai.onnx" else "", 0))
                    used.add(key[1])
                if not (facts.least_in <= len(node.input) <= facts.most_in) or not (
                    facts.least_out <= len(node.output) <= facts.most_out
                ):
                    _refuse_arity(node, facts)
                if facts.has_body:
                    refuse_mismatch_of_body(node, opsets.get("", 1))
                if functions and (called := functions.get((*key, node.overload))) is not None:
                    refuse_mismatch(node, called, functions)
                if not node.attribute:
                    continue
                for attribute in node.attribute:
                    if attribute.type in _BODIES:
                        pending += [body.node for body in subgraphs(attribute)]
                    elif attribute.HasField("g"):  # onnx reads it, whatever the type says
                        raise _unfit(
                            node, f"has a graph in its attribute {attribute.name!r}, whose type is another one"
                        )
                refuse_absurd_attributes_of(node, passed.get(key))
    return used


def refuse_negative_sizes(model: ModelProto) -> None:
    """Refuse a GatherND or a Slice that reads a negative size: a runtime that infers as onnx does would die of it.

    A declared size of -1 is not meant: a runtime takes it for one that is not known.

    :raises InvalidModelError: a node reads a negative size; the error names it.
    """
    try:
        flat = ModelProto()
        flat.CopyFrom(_flat(model))
        for graph in graphs(flat.graph):
            for value in (*graph.input, *graph.output, *graph.value_info):
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_value < 0:
                        dim.Clear()
        apart = _to_part(flat, {_operator(node) for node in nested(flat.graph.node)})
        examined = _examined(flat, apart) if apart else flat
    except (InferenceError, InvalidModelError):
        return  # the runtime reports the fault
    for node in nested(examined.graph.node):
        if node.domain == _APART and _operator(node) in MEASURING:
            raise _unfit(node, "reads a negative size")


def _refuse_unfit_alone(schema: Any, node: NodeProto) -> None:
    refuse_absurd_attributes_of(node)
    refuse_mismatch_of_body(node, schema.since_version)
    if not schema.min_input <= len(node.input) <= schema.max_input or (
        not schema.min_output <= len(node.output) <= schema.max_output
    ):
        _refuse_arity(node, _facts_of(schema))


def _refuse_depth(text: str) -> None:
    depth = 0
    for bracket in _BRACKETS.findall(_TEXTS.sub("", text)):
        depth = depth + 1 if bracket in "([{" else max(depth - 1, 0)
        if depth > _DEEPEST:  # the parser recurses for each bracket
            raise ParseError(f"More than {_DEEPEST} brackets lie within each other.")


class _Facts(NamedTuple):
    """The facts of an operator that its nodes are checked against: numbers of inputs and outputs, attributes, a body."""

    least_in: int
    most_in: int
    least_out: int
    most_out: int
    attributes: Mapping[str, int]
    has_body: bool


@lru_cache(maxsize=4096)
def _facts(domain: str, op_type: str, opset: int) -> _Facts:
    try:
        schema = onnx.defs.get_schema(op_type, min(opset, _NEWEST), "" if domain == "ai.onnx" else domain)
    except (onnx.defs.SchemaError, TypeError):  # a TypeError: the name is no text
        return _Facts(0, _NEWEST, 0, _NEWEST, {}, False)
    return _facts_of(schema)


def _facts_of(schema: Any) -> _Facts:
    types = {name: int(attribute.type) for name, attribute in schema.attributes.items()}
    arity = schema.min_input, schema.max_input, schema.min_output, schema.max_output
    return _Facts(*arity, types, not schema.domain and schema.name in ARITY_CHECKS)


def _has_kernel(op_type: str) -> bool:
    return "kernel_shape" in _facts("", op_type, _NEWEST).attributes


def _scopes(model: ModelProto) -> Iterator[tuple[Iterable[NodeProto], Mapping[str, int]]]:
    """The nodes of the graph and of each function, with the opset versions that they use."""
    versions = versions_of(model)
    yield model.graph.node, versions
    for function in model.functions:
        own = {"" if opset.domain == "ai.onnx" else opset.domain: opset.version for opset in function.opset_import}
        yield function.node, versions | own


def _refuse_arity(node: NodeProto, facts: _Facts) -> None:
    for what, count, least, most in (
        ("inputs", len(node.input), facts.least_in, facts.most_in),
        ("outputs", len(node.output), facts.least_out, facts.most_out),
    ):
        if not least <= count <= most:
            due = f"{least}" if least == most else f"{least} or more" if most >= _NEWEST else f"{least} to {most}"
            raise _unfit(node, f"has {count} {what}, and the operator has {due}")


def _refuse_other_types(model: ModelProto) -> None:
    """Refuse attributes of a type that the schema does not declare. The version converter reads them as the declared type."""
    opsets = versions_of(model)
    for node in nested(model.graph.node):
        facts = _facts(node.domain, node.op_type, opsets.get("" if node.domain == "ai.onnx" else node.domain, 0))
        for attribute in node.attribute:
            due = facts.attributes.get(attribute.name)
            if due is not None and attribute.type != due:
                got, expected = map(_type_name, (attribute.type, due))
                raise _unfit(node, f"gives its attribute {attribute.name!r} as {got}, and it is {expected}")


def _type_name(kind: int) -> str:
    known = AttributeProto.AttributeType.DESCRIPTOR.values_by_number
    return known[kind].name.lower() if kind in known else str(kind)


def _operator(node: NodeProto) -> str:
    return node.op_type.rpartition("/")[2] if node.domain == _APART else node.op_type


def _unfit(node: NodeProto, why: str) -> InvalidModelError:
    name = node.name or next(filter(None, node.output), "")
    return InvalidModelError(f"Node {name!r} ({_operator(node)}) {why}. Export the model again.")


def _to_part(model: ModelProto, used: Set[str], data_prop: bool = False) -> frozenset[str]:
    """The operators of a model whose nodes onnx may die of."""
    apart = ASSUMING & used
    if _CUTTING in used and _may_cut_less_than_nothing(_flat(model), used, data_prop):
        apart |= {_CUTTING}
    return apart


def _may_cut_less_than_nothing(flat: ModelProto, used: Set[str], data_prop: bool) -> bool:
    """True if a Slice may read a value of negative size. Sizes that are computed from what a Slice leaves are not seen."""
    if _has_negative_sizes(flat):
        return True
    sizes: dict[str, TensorProto | AttributeProto] = {
        tensor.name: tensor for graph in graphs(flat.graph) for tensor in graph.initializer
    }
    for node in nested(flat.graph.node):
        if node.op_type == "Constant" and node.output and node.attribute:
            sizes[node.output[0]] = node.attribute[0]
    after: dict[str, bool] = {}  # the values behind a Slice: is an operator between them that may make a size negative?
    is_sized = False
    for node in nested(flat.graph.node):
        place = _SIZED.get(node.op_type, _NEWEST)
        size = sizes.get(node.input[place]) if place < len(node.input) else None
        is_negative = node.op_type == "Pad" and any(
            a.name == "pads" and min(a.ints, default=0) < 0 for a in node.attribute
        )
        if size is not None:
            is_negative |= _is_negative(size)
        elif place < len(node.input):
            is_sized = True
        before = [after[name] for name in node.input if name in after]
        is_cut = node.op_type == _CUTTING
        if is_negative or (is_cut and any(before)):
            return True
        if before or is_cut:
            after.update(dict.fromkeys(node.output, any(before) or _has_kernel(node.op_type)))
    if not any(map(_has_kernel, used)) and not (is_sized and data_prop):
        return False
    blind = ModelProto()
    blind.CopyFrom(flat)
    blind.graph.input.append(helper.make_tensor_value_info(_UNKNOWN, TensorProto.INT64, [None]))
    for node in nested(blind.graph.node):
        if node.op_type == _CUTTING and len(node.input) > 1:
            node.input[1] = _UNKNOWN
    return _has_negative_sizes(
        _asked(InferenceError, onnx.shape_inference.infer_shapes, blind, False, False, data_prop)
    )


def _has_negative_sizes(model: ModelProto) -> bool:
    return any(
        dim.dim_value < 0
        for graph in graphs(model.graph)
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dim in value.type.tensor_type.shape.dim
    )


def _is_negative(sizes: TensorProto | AttributeProto) -> bool:
    """True if an initializer, or the attribute of a Constant, has a number below 0, or one that cannot be read here."""
    if isinstance(sizes, AttributeProto):
        if sizes.type in (AttributeProto.INT, AttributeProto.INTS):
            return min(sizes.i, *sizes.ints, 0) < 0
        sizes = sizes.t
    try:
        return bool((array_of(sizes) < 0).any())
    except (RefgradError, TypeError, ValueError):
        return True


def _spared(model: ModelProto, apart: Set[str], data_prop: bool = False) -> ModelProto:
    """The model itself, or a copy without the nodes of `apart` that onnx would die of: those are in a domain of refgrad.

    Types become known step by step, because one of these nodes may read the output of another.
    """
    copy = _examined(_flat(model), apart, data_prop)
    if all(node.domain != _APART for node in every_node(copy)):
        return model
    return _all_apart(model, apart) if model.functions else copy


def _flat(model: ModelProto) -> ModelProto:
    if not model.functions:
        return model
    return _asked(InvalidModelError, onnx.inliner.inline_local_functions, model)


def _examined(flat: ModelProto, operators: Set[str], data_prop: bool = False) -> ModelProto:
    """A copy in which the nodes of `operators` that onnx would die of are in a domain of refgrad."""
    copy, is_new = _all_apart(flat, operators), True
    while is_new and (apart := [node for node in _in_order(copy.graph) if node.domain == _APART]):
        inferred = _asked(InferenceError, onnx.shape_inference.infer_shapes, copy, False, False, data_prop)
        known = _known(inferred)
        ready = [node for node in apart if _is_ready(node, known)]
        if not ready:  # no more types will become known; onnx survives the first node whose inputs all have types
            ready = [node for node in apart if _is_ready(node, known, known_or_not=True)][:1]
        for node in ready:
            _put_back(node)
        is_new = bool(ready)
    return copy


def _all_apart(model: ModelProto, operators: Set[str]) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    for node in every_node(copy):
        if node.op_type in operators:
            node.op_type, node.domain = f"{node.domain}/{node.op_type}", _APART
    import_domain(copy, _APART)
    for function in copy.functions:
        import_domain(function, _APART)
    return copy


def _in_order(graph: GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and its bodies, each behind those that it depends on."""
    for node in graph.node:
        for attribute in node.attribute:
            for body in subgraphs(attribute):
                yield from _in_order(body)
        yield node


def _is_ready(node: NodeProto, known: Mapping[str, TypeProto], known_or_not: bool = False) -> bool:
    """True if onnx survives a node that was put apart, if it knows the types `known`.

    :param known_or_not: onnx survives a size that is not known, too.
    """
    operator = node.op_type.rpartition("/")[2]
    if operator == _CUTTING:
        data = known.get(node.input[0]) if node.input else None
        return known_or_not if data is None else all(dim.dim_value >= 0 for dim in data.tensor_type.shape.dim)
    if operator != _INDEXING:
        return known.keys() >= set(node.input)
    sizes = known[node.input[1]].tensor_type.shape.dim[-1:] if len(node.input) > 1 and node.input[1] in known else ()
    return sizes[0].dim_value >= 0 if sizes and sizes[0].HasField("dim_value") else known_or_not


def _known(model: ModelProto) -> dict[str, TypeProto]:
    """The known types by name, without names that two graphs define."""
    types: dict[str, TypeProto] = {}
    defined: set[str] = set()
    repeated: set[str] = set()
    for graph in graphs(model.graph):
        own = {name for node in graph.node for name in node.output}.union(value.name for value in graph.input)
        if model.ir_version >= _TENSORS_TYPED:
            for tensor in graph.initializer:
                own.add(tensor.name)
                types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        repeated |= own & defined
        defined |= own
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.WhichOneof("value") is not None:
                types[value.name] = value.type
    return {name: kind for name, kind in types.items() if name not in repeated}


def _together(model: ModelProto) -> ModelProto:
    """The model, with the nodes that `_spared` moved to a domain of refgrad back in their own domain."""
    for node in every_node(model):
        if node.domain == _APART:
            _put_back(node)
    forget_domain(model, _APART)
    for function in model.functions:
        forget_domain(function, _APART)
    return model


def _put_back(node: NodeProto) -> None:
    node.domain, _, node.op_type = node.op_type.rpartition("/")


def _asked(kind: type[Exception], ask: Callable[..., R], *arguments: Any, **options: Any) -> R:
    """The result of a call of onnx. Every exception is raised as `kind`."""
    try:
        return ask(*arguments, **options)
    except (kind, MemoryError):
        raise
    except Exception as error:
        raise kind(str(error) or type(error).__name__) from error

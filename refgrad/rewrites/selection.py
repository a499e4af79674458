"""Models made of other models: a copy with short names, and the part between two sets of names."""

from __future__ import annotations

import os
import reprlib
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from onnx import GraphProto, ModelProto, NodeProto, TypeProto, ValueInfoProto, helper

from refgrad.errors import InvalidModelError, OptionError, UnknownNameError, choices, did_you_mean
from refgrad.model.checks.malformed import explained
from refgrad.model.inference.completion import infer_completely
from refgrad.model.reading import is_large, read, skeleton_of
from refgrad.protos.traverse import names_of, reads_of, subgraphs
from refgrad.protos.types import UNNAMED

_OF_MODEL = ("ir_version", "producer_name", "producer_version", "domain", "model_version", "doc_string")

Names = ChainMap[str, str]  # the new name of a value by its name


@explained
def onnx_rename_names(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """A copy of `model` with short names: initializers i0, i1, ..., results r0, r1, ..., nodes n0, n1, ...

    The inputs and outputs of the model keep their names; a new name that one of them has is skipped. The numbers go on in
    subgraphs, so a name occurs once in the whole model. What refers to a value by name is renamed too: declared types,
    quantization annotations, device configurations. Local functions, metadata_props and the weights that training_info names
    stay as they are; metadata of a gradient says where a node came from in the model that was differentiated.

    :param model: a model, or the path of one. It is not modified, and nothing is checked. External data is referenced, not
        read: save the result in the folder of the model.
    :raises InvalidModelError: the model cannot be read.

    >>> import onnx.parser, refgrad
    >>> renamed = refgrad.onnx_rename_names(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N] x) => (float[N] y) <float two = {2}> '
    ...     '{ square = Mul(x, x)  y = Div(square, two) }'
    ... ))
    >>> print(refgrad.onnx_simple_text_plot(renamed))
    opset: domain='' version=18
    input: name='x' type=dtype('float32') shape=(N,)
    init: name='i0' type=dtype('float32') shape=() -- array([2.], dtype=float32)
    Mul(x, x) -> r0
      Div(r0, i0) -> y
    output: name='y' type=dtype('float32') shape=(N,)
    """
    return _renamed(model, _Renamer)


@explained
def onnx_rename_weights(model: ModelProto | str | os.PathLike[str]) -> ModelProto:
    """A copy of `model` whose initializers are called I0_<name>, I1_<name>, ..., so that their names tell their order.

    Everything else is called as before, and so is an initializer that is an input or an output of the model.

    :param model: a model, or the path of one, as for `onnx_rename_names`.
    :raises InvalidModelError: the model cannot be read.

    >>> import onnx.parser, refgrad
    >>> renamed = refgrad.onnx_rename_weights(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N] x) => (float[N] y) <float b = {2}, float a = {3}> '
    ...     '{ sum = Add(x, b)  y = Mul(sum, a) }'
    ... ))
    >>> [tensor.name for tensor in renamed.graph.initializer]
    ['I0_b', 'I1_a']
    """
    return _renamed(model, _WeightRenamer)


def _renamed(model: ModelProto | str | os.PathLike[str], by: type[_Renamer]) -> ModelProto:
    source = read(model, weights=False, sort=False)
    kept = {value.name for value in (*source.graph.input, *source.graph.output)}
    for training in source.training_info:
        kept.update(*map(names_of, (training.initialization, training.algorithm)))
        kept.update(entry.key for entry in (*training.initialization_binding, *training.update_binding))
    renamed = ModelProto()
    renamed.CopyFrom(source)
    by(kept, names_of(source.graph)).rename(renamed.graph, Names({name: name for name in kept}))
    return renamed


class _Renamer:
    """Renames a graph and its subgraphs; the numbers go on from graph to graph."""

    def __init__(self, taken: set[str], known: set[str]) -> None:
        self._taken, self._known = taken, known
        self._numbers = {letter: count() for letter in "irn"}

    def _fresh(self, letter: str, name: str) -> str:
        """The new name of an initializer (i), a result (r) or a node (n)."""
        return next(new for k in self._numbers[letter] if (new := f"{letter}{k}") not in self._taken)

    def rename(self, graph: GraphProto, names: Names) -> None:
        """Rename the values that `graph` defines, except for those that have an entry in `names` already."""
        own = names.maps[0]

        def define(name: str, letter: str) -> None:
            if name and name not in own:
                own[name] = self._fresh(letter, name)

        def follow(name: str) -> str:
            if name and name not in names:  # nothing defines it
                names.maps[-1][name] = self._fresh("r", name)
            return names[name] if name else ""

        sparse = [tensor.values for tensor in graph.sparse_initializer]
        for tensor in (*graph.initializer, *sparse):
            define(tensor.name, "i")
        for name in (*(value.name for value in graph.input), *(name for node in graph.node for name in node.output)):
            define(name, "r")
        for tensor in (*graph.initializer, *sparse):
            tensor.name = follow(tensor.name)
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = follow(value.name)
        for annotation in graph.quantization_annotation:
            annotation.tensor_name = follow(annotation.tensor_name)
            for entry in annotation.quant_parameter_tensor_names:
                entry.value = follow(entry.value)
        for node in graph.node:
            node.name = self._fresh("n", node.name)
            node.input[:] = [follow(name) for name in node.input]
            node.output[:] = [follow(name) for name in node.output]
            for configuration in node.device_configurations:
                for sharding in configuration.sharding_spec:
                    sharding.tensor_name = follow(sharding.tensor_name)
            for attribute in node.attribute:
                for subgraph in subgraphs(attribute):
                    self.rename(subgraph, names.new_child())


class _WeightRenamer(_Renamer):
    """Puts a number before the names of initializers."""

    def _fresh(self, letter: str, name: str) -> str:
        """The name as it was; for an initializer, with a number before it."""
        if letter != "i":
            return name
        return next(new for k in self._numbers["i"] if (new := f"I{k}_{name}") not in self._known)


@explained
def select_model_inputs_outputs(
    model: ModelProto | str | os.PathLike[str],
    outputs: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    *,
    keep_inputs: bool = False,
) -> ModelProto:
    """The part of `model` that computes `outputs` from `inputs`: only the nodes and initializers that this needs.

    An input may be any result: whatever computes it is left out, unless another output needs it. An initializer that becomes
    an input keeps its value as default. The types of new inputs and outputs are those that the model declares, or what shape
    inference finds; a dimension that it does not know has no size and no name. mlprodict's function of this name keeps every
    input of the model by default, this one those that are needed. training_info is left out.

    :param model: a model, or the path of one. It is not modified. External data is referenced, not read: save the result in
        the folder of the model.
    :param outputs: names of outputs, results, initializers or inputs, in the order wanted; by default the model's outputs.
    :param inputs: names of inputs, results or initializers, in the order wanted; by default the inputs of the model that
        the outputs need.
    :param keep_inputs: add to `inputs` the inputs of the model that the outputs still need.
    :raises InvalidModelError: the model cannot be read, a node needs what nothing computes, or a type cannot be inferred.
    :raises UnknownNameError: a name that the model does not have or that is given twice, or an output that needs inputs that
        are not among `inputs` (without `keep_inputs`).
    :raises OptionError: names that are not a list of strings, or no output at all.

    >>> import onnx.parser, refgrad
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 18]> g (float[N] x, float[N] label) => (float[N] y, float[N] loss) '
    ...     '{ y = Exp(x)  difference = Sub(y, label)  loss = Mul(difference, difference) }'
    ... )
    >>> print(refgrad.onnx_simple_text_plot(refgrad.select_model_inputs_outputs(model, ["loss"], ["y", "label"])))
    opset: domain='' version=18
    input: name='y' type=dtype('float32') shape=(N,)
    input: name='label' type=dtype('float32') shape=(N,)
    Sub(y, label) -> difference
      Mul(difference, difference) -> loss
    output: name='loss' type=dtype('float32') shape=(N,)
    """
    return _Selection(read(model, weights=False, sort=False)).model(outputs, inputs, keep_inputs)


class _Selection:
    """One selection: the model, the origin of its values, and the part that is needed.

    onnx.utils.Extractor does not see what subgraphs read, and refuses sparse initializers, annotations and undeclared types.
    """

    def __init__(self, source: ModelProto) -> None:
        self.source, self.graph = source, source.graph
        self.inputs = {value.name: value for value in self.graph.input}
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self.sparse = {tensor.values.name: tensor for tensor in self.graph.sparse_initializer}
        self.producer = _producers(self.graph.node)

    def model(self, outputs: Sequence[str] | None, inputs: Sequence[str] | None, keep_inputs: bool) -> ModelProto:
        """The model of the selected part."""
        known = [*self.inputs, *self.initializers, *self.sparse, *self.producer]
        given = [value.name for value in self.graph.output] if outputs is None else _checked("outputs", outputs, known)
        if not given:
            raise OptionError(f"outputs is empty; the model has: {choices(known)}.")
        chosen = None if inputs is None else _checked("inputs", inputs, known)
        for name in chosen or ():
            if name in self.sparse:
                raise UnknownNameError(f"{name!r} in inputs is a sparse initializer, which cannot become an input.")
        needed, nodes = self._needed(given, [*chosen, *self.inputs] if chosen is not None and keep_inputs else chosen)
        if chosen is None or keep_inputs:
            chosen = [*(chosen or ()), *(name for name in self.inputs if name in needed and name not in (chosen or ()))]
        if inputs is not None and self.source.ir_version < 4:  # where every initializer has to be an input
            chosen += [name for name in self.initializers if name in needed and name not in chosen]
        return self._built(given, chosen, needed | set(chosen), nodes)

    def _needed(self, outputs: list[str], inputs: list[str] | None) -> tuple[set[str], list[int]]:
        """The values that `outputs` need down to `inputs`, and the positions of the nodes that compute them."""
        cut = set(self.inputs if inputs is None else inputs)
        needed, nodes = set[str](), set[int]()
        for output in outputs:
            missing = []
            pending = [(output, "")]
            while pending:
                name, reader = pending.pop()
                if name in needed:
                    continue
                needed.add(name)
                if name in cut or name in self.initializers or name in self.sparse:
                    continue
                if name in self.inputs:
                    missing.append(name)
                elif name not in self.producer:
                    where = f"node {reader!r} needs it" if reader else "it is an output"
                    raise InvalidModelError(f"Nothing gives {name!r}, and {where}. Export the model again.")
                elif (position := self.producer[name]) not in nodes:
                    nodes.add(position)
                    node = self.graph.node[position]
                    pending += [(read_name, node.name or node.op_type) for read_name in reads_of(node)]
            if missing:
                raise UnknownNameError(
                    f"Output {output!r} needs more than inputs has: {choices(reversed(missing))}. "
                    "Add them to inputs, or results that lie between them and the output."
                )
        return needed, sorted(nodes)

    def _built(self, outputs: list[str], inputs: list[str], needed: set[str], nodes: list[int]) -> ModelProto:
        source, ends = self.source, {*inputs, *outputs}
        result = ModelProto(
            opset_import=source.opset_import,
            metadata_props=source.metadata_props,
            functions=source.functions,
            configuration=source.configuration,
        )
        graph = result.graph
        for old, new, fields in ((source, result, _OF_MODEL), (self.graph, graph, ("name", "doc_string"))):
            for field in filter(old.HasField, fields):
                setattr(new, field, getattr(old, field))
        graph.metadata_props.extend(self.graph.metadata_props)
        graph.node.extend(self.graph.node[position] for position in nodes)
        self._release(graph.node, set(inputs))
        types = self._types(ends)
        graph.input.extend(types[name] for name in inputs)
        graph.output.extend(types[name] for name in outputs)
        there = needed.union(*(node.output for node in graph.node))
        graph.value_info.extend(v for v in self.graph.value_info if v.name in there and v.name not in ends)
        graph.initializer.extend(tensor for name, tensor in self.initializers.items() if name in needed)
        graph.sparse_initializer.extend(tensor for name, tensor in self.sparse.items() if name in needed)
        for annotation in self.graph.quantization_annotation:
            if there.issuperset((annotation.tensor_name, *(e.value for e in annotation.quant_parameter_tensor_names))):
                graph.quantization_annotation.append(annotation)
        return result

    def _release(self, nodes: Iterable[NodeProto], inputs: set[str]) -> None:
        """Rename a result that has become an input where its node stays for its other results."""
        taken: set[str] = set()
        for node in nodes:
            for position, name in enumerate(node.output):
                if name in inputs:
                    taken = taken or names_of(self.graph)
                    while name in taken:
                        name += "_unused"
                    taken.add(name)
                    node.output[position] = name

    def _types(self, names: set[str]) -> dict[str, ValueInfoProto]:
        """Each of `names` with its type: as declared, or as inferred where no type or no shape is declared."""
        types = {
            name: helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            for name, tensor in self.initializers.items()
            if name in names
        }
        for name in names.intersection(self.sparse):
            sparse = self.sparse[name]
            types[name] = helper.make_tensor_value_info(name, sparse.values.data_type, list(sparse.dims))
        for value in (*self.graph.value_info, *self.graph.output, *self.graph.input):
            if value.name in names and _is_declared(value.type):
                types[value.name] = value
        if all(name in types and _has_shape(types[name].type) for name in names):
            return types
        for value in inferred(self.source):
            if value.name in names and not (value.name in types and _has_shape(types[value.name].type)):
                types[value.name] = value
        for name in names - types.keys():
            raise InvalidModelError(
                f"The type of {name!r} is not declared, and shape inference does not find it. "
                "Add it to the value_info of the graph (onnx.helper.make_tensor_value_info)."
            )
        return types


def inferred(model: ModelProto) -> Iterator[ValueInfoProto]:
    """Every value of which the type is inferred, with it, without the names that inference gave to dimensions."""
    apart = {tensor.name: tensor for tensor in model.graph.initializer if is_large(tensor)}
    found = infer_completely(skeleton_of(model, apart))
    for value in filter(lambda value: _is_declared(value.type), (*found.value_info, *found.output)):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith(UNNAMED):
                dim.Clear()
        yield value


def _checked(argument: str, names: object, known: Sequence[str]) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise OptionError(f"{argument} is a list of names, not {reprlib.repr(names)}; the model has: {choices(known)}.")
    for position, name in enumerate(names):
        if name in names[:position]:
            raise UnknownNameError(f"{argument} has {name!r} twice.")
        if name not in known:
            raise UnknownNameError(
                f"{name!r} in {argument} is not a value of the model.{did_you_mean(name, known)} It has: {choices(known)}."
            )
    return list(names)


def _producers(nodes: Sequence[NodeProto]) -> dict[str, int]:
    """The position of the node that computes a value."""
    producers: dict[str, int] = {}
    for position, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in producers:
                raise InvalidModelError(f"Two nodes compute {name!r}. Export the model again.")
            producers[name] = position
    return producers


def _is_declared(kind: TypeProto) -> bool:
    """True if a type says what a value is."""
    return bool(kind.tensor_type.elem_type) if kind.HasField("tensor_type") else kind.WhichOneof("value") is not None


def _has_shape(kind: TypeProto) -> bool:
    return not kind.HasField("tensor_type") or kind.tensor_type.HasField("shape")

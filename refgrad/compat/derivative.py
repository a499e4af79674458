"""A drop-in for experimental_experiment.gradient.grad_helper: the same functions, arguments and graphs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Flag
from typing import Any, Protocol

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from refgrad.builder.nodes import NodeBuilder
from refgrad.errors import (
    FeedError,
    NoGradientError,
    OptionError,
    OptionTypeError,
    UnknownNameError,
    choices,
    did_you_mean,
)
from refgrad.escaping import printable
from refgrad.model.checks.malformed import explained
from refgrad.model.external import load
from refgrad.model.reading import read
from refgrad.protos.traverse import captured, subgraphs
from refgrad.protos.types import FLOATS
from refgrad.reverse.gradient import gradient, preflight
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.dialects import get_dialect

BUILDERS = ("refgrad", "onnxruntime")
_KINDS = {
    "weights": "a float initializer",
    "inputs": "a float input that is differentiated by",
    "label": "an input or an output",
    "loss": "an output",
}


class DerivativeOptions(Flag):
    """The options for the graph of a gradient; KeepOutputs and FillGrad are combined by `|`.

    - Zero: an input `<output>_grad` per float output.
    - KeepYieldOp: the cotangents come from com.microsoft.YieldOp, as ONNX Runtime's TrainingAgent wants them.
    - KeepOutputs: all outputs of the model follow the gradients.
    - FillGrad: the cotangents are 1 everywhere; only with KeepOutputs.
    - Loss: the gradient of one output, the loss, which follows the gradients.

    Loss is a bit of its own; the original's value, 5, equals KeepYieldOp | FillGrad.
    """

    Zero = 0
    KeepYieldOp = 1
    KeepOutputs = 2
    FillGrad = 4
    Loss = 8


@explained
def onnx_derivative(
    onx: ModelProto | str | os.PathLike[str],
    weights: Sequence[str] | None = None,
    inputs: Sequence[str] | None = None,
    options: DerivativeOptions = DerivativeOptions.Zero,
    loss: str | None = None,
    label: str | Collection[str] | None = None,
    path_name: str | os.PathLike[str] | None = None,
    verbose: int = 0,
    builder: str = "refgrad",
    *,
    dialect: str = "ort",
) -> ModelProto:
    """The gradient of a model, as a graph with ONNX Runtime's training operators and its names.

    Its inputs are the model's inputs, then `weights`, which have no default, then `<output>_grad` per float output (none
    with KeepYieldOp, FillGrad or Loss). Its outputs are `<input>_grad`, `<weight>_grad`, then with KeepOutputs the
    outputs of the model, with Loss the loss. All have the shapes and types of what they are named after.

    Unlike in the original, `inputs` counts, KeepOutputs keeps every output, and Loss is an option of its own.

    :param onx: a model, or the path of one.
    :param weights: the float initializers to differentiate with respect to; None for all that an output depends on,
        except settings of operators and the constants of `add_loss_output`.
    :param inputs: the float inputs to differentiate with respect to; None for all.
    :param options: see `DerivativeOptions`.
    :param loss: with Loss, the output that is the loss.
    :param label: with Loss, the input that is the label, or several; they get no gradient. It may also be the output that is
        compared with the label, as in onnxcustom: then every input gets a gradient. If it is the only output, and the loss is
        no output, the model is the part before the loss: an input `<label>_grad` is its cotangent.
    :param path_name: with Loss, the file that the gradient is saved to.
    :param verbose: 1 prints what was done.
    :param builder: "refgrad", or "onnxruntime": OrtModuleGraphBuilder of the wheel onnxruntime-training-cpu 1.19.2, which
        optimizes the model first, in a process of its own.
    :param dialect: as in `refgrad.gradient`; "onnx" for a graph that runs without training operators.
    :raises OptionTypeError: options are not DerivativeOptions (a TypeError).
    :raises OptionError: options that exclude each other, FillGrad without KeepOutputs, Loss without path_name, loss or label,
        one of these three without Loss, Loss with weights, an unknown builder or dialect (a ValueError).
    :raises UnknownNameError: a name that does not belong to a float initializer, an input or an output.
    :raises NoGradientError: an operator on the way has no derivative, or an initializer in `weights` is not a float (a
        RuntimeError).
    :raises BuilderError: ONNX Runtime's builder is not installed, or did not make a gradient.
    :raises OutputFileError: the gradient cannot be saved.

    >>> import onnx.parser, refgrad
    >>> add = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 15]> add (float[N, 3] X) => (float[N, 3] Y) <float c = {2}> { Y = Add(X, c) }'
    ... )
    >>> grad = refgrad.onnx_derivative(add, options=refgrad.DerivativeOptions.KeepOutputs)
    >>> [value.name for value in grad.graph.input], [value.name for value in grad.graph.output]
    (['X', 'c', 'Y_grad'], ['X_grad', 'c_grad', 'Y'])
    """
    _check_options(options, weights, loss, label, path_name, builder, dialect)
    source = read(onx)
    if builder == "onnxruntime":
        from refgrad.derivatives.ortbuilder import require

        require()  # before weights are read
        if not isinstance(onx, ModelProto):
            load(source, onx)
    model = source if builder == "onnxruntime" else onx
    labels: Collection[str] = ()
    if loss is not None and label is not None:
        labels = [label] if isinstance(label, str) else label
        feeds = [value.name for value in source.graph.input]
        results = [value.name for value in source.graph.output]
        _check_names("label", labels, [*feeds, *results])
        if list(labels) == results and loss not in results:  # the model without its loss
            labels, options = (), DerivativeOptions.KeepOutputs
        else:
            _check_names("loss", [loss], results)
            model = select_model_inputs_outputs(source, [loss], feeds)
            options = DerivativeOptions.KeepOutputs | DerivativeOptions.FillGrad
    by_inputs, by_weights = _selected(model, weights, inputs, labels)
    if builder == "onnxruntime":
        made = _by_onnxruntime(read(model), by_inputs, by_weights, options)
    else:
        made = gradient(
            model,
            [*by_inputs, *by_weights],
            dialect=dialect,
            cotangent=_cotangent(options),
            keep_outputs=bool(options & DerivativeOptions.KeepOutputs),
        )
        _drop_initializers(made, by_weights)
        _drop_copies(made, {name for node in source.graph.node for name in node.output})
    if path_name is not None:
        from refgrad.model.writing import save_made

        save_made(made, path_name, onx)
    if verbose:
        names = printable(", ".join((*by_inputs, *by_weights)))
        print(f"[onnx_derivative] {builder}: {len(source.graph.node)} nodes by {names}: {len(made.graph.node)} nodes")
    return made


class SessionInput(Protocol):
    """An input as `onnxruntime.InferenceSession.get_inputs()` describes it."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def type(self) -> str:
        """Its type, `tensor(float)` for one."""

    @property
    def shape(self) -> Sequence[int | str | None]:
        """Its dimensions; onnxruntime describes an unknown rank like a scalar."""


def random_feed(
    inputs: Iterable[ValueInfoProto | SessionInput], batch: int = 10, empty_dimension: int = 1
) -> dict[str, np.ndarray]:
    """Random arrays for the inputs of a graph, {name: array}, of the types and shapes that they declare.

    Floats are normally distributed, integers lie between 0 and 9 (as far as their type goes), strings are digits. They come
    from NumPy's global generator: `np.random.seed` makes them repeatable.

    :param inputs: the inputs, `model.graph.input` or `session.get_inputs()` of an onnxruntime.InferenceSession.
    :param batch: the first dimension where it is unknown; a dimension of the same name has the same size everywhere.
    :param empty_dimension: any other dimension that is unknown, and those that are 0.
    :raises FeedError: an input is not a tensor or does not declare its shape, or an element of `inputs` is not an input.
    """
    if not isinstance(inputs, Iterable):
        raise FeedError(f"inputs is a list of inputs, such as model.graph.input, not {type(inputs).__name__}.")
    sizes: dict[str, int] = {}
    return {value.name: _random(value, batch, empty_dimension, sizes) for value in map(_as_proto, inputs)}


def _as_proto(value: ValueInfoProto | SessionInput) -> ValueInfoProto:
    if isinstance(value, ValueInfoProto):
        return value
    if not all(hasattr(value, name) for name in ("name", "type", "shape")):
        raise FeedError(
            f"{value!r} does not describe an input: give model.graph.input, or session.get_inputs() of an InferenceSession."
        )
    prefix, element = value.type.removesuffix(")").split("(", 1) if "(" in value.type else ("", "")
    kind = dict(TensorProto.DataType.items()).get(element.upper())
    if prefix != "tensor" or kind is None:
        return ValueInfoProto(name=value.name)
    dims = [None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape]
    return helper.make_tensor_value_info(value.name, kind, dims)


def _random(value: ValueInfoProto, batch: int, empty_dimension: int, sizes: dict[str, int]) -> np.ndarray:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.elem_type or not tensor.HasField("shape"):
        raise FeedError(f"Input {value.name!r} is not declared as a tensor of known rank: make its value yourself.")
    shape = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value"):
            shape.append(dim.dim_value or empty_dimension)
        else:
            size = empty_dimension if axis else batch
            shape.append(sizes.setdefault(dim.dim_param, size) if dim.dim_param else size)
    kind = tensor.elem_type
    digits = np.asarray(np.random.randint(0, 10, shape))
    if kind == TensorProto.STRING:
        return digits.astype(str).astype(object)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if kind in _INTEGERS:
        return np.minimum(digits, _INTEGERS[kind], out=digits).astype(dtype)
    numbers = np.asarray(np.random.standard_normal(shape))
    if kind == TensorProto.BOOL:
        return np.asarray(numbers > 0)
    if kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return np.asarray(numbers + 1j * np.random.standard_normal(shape)).astype(dtype)
    return numbers.astype(dtype)


_INTEGERS: dict[int, int] = {  # the largest number up to 9 that each type holds
    **dict.fromkeys((TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64), 9),
    **dict.fromkeys((TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64), 9),
    TensorProto.UINT4: 9,
    TensorProto.INT4: 7,
    TensorProto.UINT2: 3,
    TensorProto.INT2: 1,
}


def _check_options(
    options: DerivativeOptions,
    weights: Sequence[str] | None,
    loss: str | None,
    label: str | Collection[str] | None,
    path_name: str | os.PathLike[str] | None,
    builder: str,
    dialect: str,
) -> None:
    if not isinstance(options, DerivativeOptions):
        raise OptionTypeError(f"options are DerivativeOptions, not {type(options).__name__}.")
    if builder not in BUILDERS:
        raise OptionError(f"There is no builder {builder!r}; there are {choices(BUILDERS)}.")
    if builder == "onnxruntime" and not get_dialect(dialect).follows_onnxruntime:
        raise OptionError(f"ONNX Runtime's builder has no dialect {dialect!r}: use builder='refgrad' or dialect='ort'.")
    given = {"loss": loss, "label": label, "path_name": path_name}
    if options & DerivativeOptions.Loss:
        if options != DerivativeOptions.Loss:
            raise OptionError("DerivativeOptions.Loss stands alone: it keeps the loss and fills its cotangent with 1.")
        for name, value in given.items():
            if not value:
                raise OptionError(f"DerivativeOptions.Loss needs {name}.")
        if weights is not None:
            raise OptionError("DerivativeOptions.Loss is for all weights: leave weights out.")
        return
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"{name} is for options=DerivativeOptions.Loss.")
    if options & DerivativeOptions.KeepYieldOp and options != DerivativeOptions.KeepYieldOp:
        raise OptionError(
            "DerivativeOptions.KeepYieldOp stands alone: YieldOp returns the outputs and takes the cotangents."
        )
    if options & DerivativeOptions.FillGrad and not options & DerivativeOptions.KeepOutputs:
        raise OptionError("DerivativeOptions.FillGrad needs KeepOutputs: FillGrad | KeepOutputs.")


def _cotangent(options: DerivativeOptions) -> str:
    if options & DerivativeOptions.KeepYieldOp:
        return "yield"
    return "ones" if options & DerivativeOptions.FillGrad else "input"


def _selected(
    model: ModelProto | str | os.PathLike[str],
    weights: Sequence[str] | None,
    inputs: Sequence[str] | None,
    labels: Collection[str],
) -> tuple[list[str], list[str]]:
    """The inputs and the initializers to differentiate with respect to."""
    graph = read(model).graph
    initializers = [tensor.name for tensor in graph.initializer if tensor.data_type in FLOATS]
    known = {tensor.name for tensor in graph.initializer}
    floats = [v.name for v in graph.input if v.name not in known and v.type.tensor_type.elem_type in FLOATS]
    if weights is not None:
        _check_types(weights, graph)
        _check_names("weights", weights, initializers)
    if inputs is not None:
        _check_names("inputs", inputs, [name for name in floats if name not in labels])
    default = set(preflight(model).wrt if weights is None or inputs is None else ())
    by_inputs = [n for n in default if n not in known and n not in labels] if inputs is None else list(inputs)
    by_weights = [n for n in initializers if n in default] if weights is None else list(weights)
    return [name for name in floats if name in by_inputs], by_weights


def _check_types(weights: Any, graph: GraphProto) -> None:
    """Refuse an initializer that is not a float, such as a zero point."""
    names = weights if isinstance(weights, Collection) and not isinstance(weights, str | bytes) else ()
    for tensor in graph.initializer:
        if tensor.data_type not in FLOATS and tensor.name in names:
            kind = TensorProto.DataType.Name(tensor.data_type)
            raise NoGradientError(
                f"{tensor.name!r} in weights is {kind}, and only floats have gradients. Leave it out."
            )


def _check_names(argument: str, names: Any, known: Sequence[str]) -> None:
    if isinstance(names, str | bytes) or not isinstance(names, Collection) or getattr(names, "ndim", 1) != 1:
        raise OptionError(f"{argument} is a list of names, not {names!r}.")
    for name in names:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise UnknownNameError(f"{name!r} is not {_KINDS[argument]}.{hint} The model has: {choices(known)}.")
    if len(set(names)) < len(names):
        raise UnknownNameError(f"{argument} has a name twice: {choices(names)}.")


def _drop_initializers(model: ModelProto, names: Collection[str]) -> None:
    kept = [tensor for tensor in model.graph.initializer if tensor.name not in names]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def _drop_copies(model: ModelProto, forward: Collection[str]) -> None:
    """Let a Sum read a contribution twice. The documented graphs do not have the copy that gives it a second name."""
    graph = model.graph
    within = (inner for node in graph.node for a in node.attribute for inner in subgraphs(a))
    kept = {*forward, *(value.name for value in graph.output), *(name for inner in within for name in captured(inner))}
    renamed: dict[str, str] = {}
    nodes = []
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if node.op_type == "Identity" and not node.domain and node.output[0] not in kept:
            renamed[node.output[0]] = node.input[0]
        else:
            nodes.append(node)
    if renamed:
        del graph.node[:]
        graph.node.extend(nodes)


def _by_onnxruntime(model: ModelProto, inputs: list[str], weights: list[str], options: DerivativeOptions) -> ModelProto:
    """The graph of OrtModuleGraphBuilder. The cotangents that `options` ask for take the place of its YieldOp."""
    from refgrad.derivatives.ortbuilder import build_module

    made = build_module(model, inputs, weights)
    if options & DerivativeOptions.KeepYieldOp:
        return made
    graph = made.graph
    [place] = [k for k, node in enumerate(graph.node) if node.op_type == "YieldOp"]
    flat = {k for a in graph.node[place].attribute if a.name == "non_differentiable_outputs" for k in a.ints}
    outputs = [name for k, name in enumerate(graph.node[place].input) if k not in flat]
    _rename(made, dict(zip(graph.node[place].output, (f"{name}_grad" for name in outputs), strict=True)))
    types = {value.name: value.type for value in model.graph.output}
    nodes = list(graph.node)
    if options & DerivativeOptions.FillGrad:
        nodes[place : place + 1] = _ones({name: types[name] for name in outputs})
    else:
        del nodes[place]
        for name in outputs:
            graph.input.add(name=f"{name}_grad", type=types[name])
    if options & DerivativeOptions.KeepOutputs:
        graph.output.extend(model.graph.output)
    del graph.node[:]
    graph.node.extend(nodes)
    return select_model_inputs_outputs(made, inputs=[value.name for value in graph.input])


def _ones(outputs: Mapping[str, TypeProto]) -> list[NodeProto]:
    """The cotangents of outputs, by their documented names."""
    builder = NodeBuilder(set())
    for output, kind in outputs.items():
        one = numpy_helper.from_array(np.ones(1, helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)))
        shape = builder.add_as("Shape", [output], f"{output}_shape")
        builder.add_as("ConstantOfShape", [shape], f"{output}_grad", value=one)
    return builder.take()


def _rename(model: ModelProto, names: dict[str, str]) -> None:
    """Give values new names. A value that already has one gets another: an output that is read on has two cotangents."""
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    changed = {old: new for old, new in names.items() if old != new}
    for new in list(changed.values()):
        if new in taken:
            aside = f"{new}_1"
            while aside in taken:
                aside += "_"
            changed[new] = aside
    for node in model.graph.node:
        for values in (node.input, node.output):
            values[:] = [changed.get(name, name) for name in values]

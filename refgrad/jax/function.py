"""`refgrad.jax.function`: a model as a function of JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from onnx import ModelProto

from refgrad.backends import get_backend
from refgrad.backends.base import Value, check_feeds, graph_inputs, graph_outputs, load_model
from refgrad.backends.onnxruntime import SLEEPING, CpuBackend
from refgrad.errors import FeedError, InvalidModelError, OptionError, OptionTypeError, choices, did_you_mean
from refgrad.jax.primitive import run
from refgrad.jax.programs import FunctionSettings, Root
from refgrad.model.checks.malformed import explained
from refgrad.model.external import array_of
from refgrad.model.reading import read, skeleton_of
from refgrad.protos.traverse import every_node
from refgrad.tables.conventions import ConventionOptions, Conventions
from refgrad.tables.randomness import IN_TRAINING, may_draw, operator_of
from refgrad.training.outputs import without_maps
from refgrad.training.step import trained


class Function:
    """A model as a function of JAX: what `refgrad.jax.function` returns.

    `inputs` and `outputs` describe what it takes and returns, in order. `params` are the weights that are arguments, by
    their names in the model; None where there are none.
    """

    def __init__(
        self, root: Root, inputs: Sequence[Value], outputs: Sequence[Value], weights: Sequence[Value], params: Any
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.params: dict[str, jax.Array] | None = params
        self._root, self._weights = root, tuple(weights)
        self.__name__ = self.__qualname__ = root.model.graph.name

    def __call__(self, /, *arrays: Any, **named: Any) -> Any:
        """Compute the outputs: an array, or a tuple of arrays where the model has several outputs.

        :raises FeedError: an input is missing, unknown or there twice, or has another dtype or shape than the model declares.
        :raises OptionError: the model has float64, and JAX's 64-bit mode is off.
        """
        weights: Mapping[str, Any] = {}
        if self.params is not None:
            if not arrays or not isinstance(arrays[0], Mapping):
                raise FeedError(
                    "The first argument is the dict of weights: f(f.params, ...), or another with its names."
                )
            weights, *arrays = arrays  # type: ignore[assignment]
        values = (*self._weights, *self.inputs)
        self._refuse_unknown(weights)
        given = {**weights, **self._by_name(arrays, named)}
        for value in (*values, *self.outputs):
            _refuse_double(value)
        known = {value.name: value for value in values}
        traced = {name: _array(array, known[name]) for name, array in given.items() if name in known}
        unknown = dict.fromkeys(given.keys() - known.keys(), np.zeros(()))
        check_feeds({name: _stand_in(array, known[name]) for name, array in traced.items()} | unknown, values)
        outputs = run(self._root, [traced[value.name] for value in values])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def __repr__(self) -> str:
        taken = ", ".join(map(str, self.inputs))
        weights = "" if self.params is None else f"{len(self.params)} weights, "
        return f"<{self.__name__}: ({weights}{taken}) -> {', '.join(map(str, self.outputs))}>"

    def _by_name(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        names = [value.name for value in self.inputs]
        if len(arrays) > len(names):
            raise FeedError(f"The model has {len(names)} inputs, {choices(names)}, and {len(arrays)} are given.")
        given = dict(zip(names, arrays, strict=False))
        for name in named:
            if name in given:
                raise FeedError(f"Input {name!r} is given twice, by position and by name.")
            if any(name == value.name for value in self._weights):
                raise FeedError(f"{name!r} is a weight: put it into the dict that is the first argument.")
        return {**given, **named}

    def _refuse_unknown(self, weights: Mapping[str, Any]) -> None:
        names = [value.name for value in self._weights]
        for name in weights:
            if name not in names:
                raise FeedError(
                    f"{name!r} is no weight of this function.{did_you_mean(name, names)} It has {choices(names)}."
                )


@explained
def function(
    model: ModelProto | str | os.PathLike[str],
    *,
    trainable: bool | Sequence[str] = False,
    batch_axis: int | None = None,
    backend: str = "ort-cpu",
    options: Mapping[str, Any] | None = None,
    **conventions: Unpack[ConventionOptions],
) -> Function:
    """A function of JAX arrays that computes what `model` does, in jit, grad, vmap, jvp, jacfwd, hessian and the like.

    It is called with the inputs of the model, by position in their order or by name, and returns the output, or the tuple of
    the outputs. With `trainable` the first argument is a dict of weights, `f(f.params, x)`, so that `jax.grad(loss)` by them
    has a gradient for each. Derivatives are models that `refgrad.gradient` and `refgrad.jvp` make when they are needed,
    to any order; XLA calls the executor for each model. Integers and booleans have no gradient, neither as inputs nor as
    outputs. Python's numbers take the type of the input; arrays have to have it. Without JAX's 64-bit mode an int32 is
    taken for an int64, and returned for one.

    `vmap` calls the model once for each element, with the loop in XLA, or once in all with `batch_axis`.

    :param model: a model, or the path of one. It is not modified, and may be changed afterwards.
    :param trainable: True makes the weights arguments: all parameters that `refgrad.weights` finds. A list has names of
        float initializers, or patterns ("head.*").
    :param batch_axis: the axis along which every input and output has a row for each sample, where the rows of the outputs
        depend on the same rows of the inputs alone. You say so; nothing checks it. `vmap` then makes one longer batch of all.
        It does not do so by weights, nor for gradients of weights, which are sums over samples.
    :param backend: what runs the models: a name that `refgrad.backends.get_backend` knows.
    :param options: arguments of the executor's `prepare`, such as {"threads": 1}. The threads of "ort-cpu" do not spin between
        calls, unless {"config": {"session.intra_op.allow_spinning": "1"}} says so.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises InvalidModelError: the model cannot be read, or an input or an output is not a tensor of numbers.
    :raises UnknownNameError: a name in `trainable` that does not exist, or nothing is trainable.
    :raises OptionError: a wrong option; a node draws random numbers; or there is no such batch axis.
    :raises BackendError: the executor does not exist or is not installed.

    >>> import jax, jax.numpy as jnp, onnx.parser, refgrad.jax
    >>> square = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> square (float[N] x) => (float[N] y) { y = Mul(x, x) }'
    ... )
    >>> f = refgrad.jax.function(square)
    >>> jax.jit(jax.grad(lambda x: f(x).sum()))(jnp.array([1.0, 2.0])).tolist()
    [2.0, 4.0]
    >>> jax.hessian(lambda x: f(x).sum())(jnp.array([1.0, 2.0])).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    settings = _settings(batch_axis, Conventions.of("function", conventions), backend, options)
    if trainable is not False and not isinstance(trainable, bool | str | Sequence):
        raise OptionTypeError(f"trainable is a bool or a list of names, not {trainable!r}.")
    weights: dict[str, np.ndarray] = {}
    if trainable is not False:
        model, weights = trained(model, None if trainable is True else trainable)
    loaded = without_maps(load_model(read(model) if isinstance(model, ModelProto) else model))
    _refuse_random(loaded)
    proto = skeleton_of(loaded, {t.name: t for t in loaded.graph.initializer if t.name in weights})
    found = {value.name: value for value in graph_inputs(proto.graph)}
    inputs = tuple(value for name, value in found.items() if name not in weights and not value.has_default)
    outputs = graph_outputs(proto.graph)
    for value, what in (*((value, "Input") for value in inputs), *((value, "Output") for value in outputs)):
        _refuse_unfit(value, what)
    if batch_axis is not None:
        _check_axis(batch_axis, inputs, outputs)
    sampled = {value.name for value in inputs} if batch_axis is not None else set()
    held = [found[name] for name in weights]
    params = None
    if trainable is not False:
        for value in held:
            _refuse_double(value)
        params = {name: jnp.asarray(array) for name, array in weights.items()}
    return Function(Root(proto, [*held, *inputs], sampled, settings), inputs, outputs, held, params)


def _settings(
    batch_axis: int | None, conventions: Conventions, backend: str, options: Mapping[str, Any] | None
) -> FunctionSettings:
    if batch_axis is not None and (type(batch_axis) is not int or batch_axis < 0):
        raise OptionError(f"batch_axis={batch_axis!r} is not an axis. Give a number from 0 on, or None.")
    given = dict(options or {})
    if isinstance(get_backend(backend), CpuBackend):  # another executor refuses options that it does not have
        given["config"] = SLEEPING | dict(given.get("config", {}))
    return FunctionSettings(backend, given, conventions, batch_axis)


def _refuse_unfit(value: Value, what: str) -> None:
    if value.kind == "tensor" and value.dtype is not None and value.dtype.kind in "biufV":
        return
    is_text = value.dtype == np.dtype(object)
    kind = value.kind if value.kind != "tensor" else "of strings" if is_text else str(value.dtype or "of no type")
    raise InvalidModelError(
        f"{what} {value.name!r} is {'a ' if value.kind != 'tensor' else ''}{kind}, and JAX has arrays of numbers alone. Take "
        "the part of the model without it: refgrad.select_model_inputs_outputs."
    )


def _refuse_random(model: ModelProto) -> None:
    """A function of JAX is the same in every call, and a derivative draws other numbers than the model did."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in every_node(model):
        if not may_draw(node):
            continue
        place = IN_TRAINING.get(operator_of(node))
        if place is not None:
            mode = node.input[place] if len(node.input) > place else ""
            if not mode or (mode in constants and not array_of(constants[mode]).any()):
                continue
        raise OptionError(
            f"Node {node.name or next(iter(node.output), '')!r} ({node.op_type}) draws random numbers, and a function of JAX "
            "does not. Export the model for inference, or with the random numbers as an input, from jax.random."
        )


def _check_axis(axis: int, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    sizes = {}
    for value in (*inputs, *outputs):
        if value.shape is None or len(value.shape) <= axis or isinstance(value.shape[axis], int):
            raise OptionError(
                f"batch_axis={axis}: {value} has no batch of any size there. Declare that axis of it by a name, as in "
                "float[N, 3], or leave batch_axis out."
            )
        sizes[value.name] = value.shape[axis]
    if len({sizes[value.name] for value in inputs}) > 1:
        raise OptionError(
            f"batch_axis={axis}: the inputs have batches of different sizes there, {choices(map(str, sizes.values()))}."
        )


def _refuse_double(value: Value) -> None:
    if value.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise OptionError(
            f"{value.name!r} is float64, which JAX has in its 64-bit mode alone. Switch it on first: "
            "jax.config.update('jax_enable_x64', True)."
        )


def _array(given: Any, value: Value) -> Any:
    """`given` as an array; a number of Python gets the dtype of the input, where JAX promotes it to that."""
    if isinstance(given, jax.Array):
        array = given
    else:
        try:
            array = jnp.asarray(given)
        except (TypeError, ValueError) as error:
            raise FeedError(
                f"Input {value.name!r} is given as {type(given).__name__}, which is not an array of numbers."
            ) from error
    wanted = jax.dtypes.canonicalize_dtype(value.dtype)
    if array.dtype != wanted and array.weak_type and jnp.result_type(array, wanted) == wanted:
        return array.astype(wanted)
    return array


def _stand_in(array: Any, value: Value) -> np.ndarray:
    """An array of the same shape, without memory, of the dtype as the model has it."""
    dtype = value.dtype if array.dtype == jax.dtypes.canonicalize_dtype(value.dtype) else array.dtype
    return np.broadcast_to(np.zeros((), dtype), array.shape)

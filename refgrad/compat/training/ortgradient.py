"""The forward and the backward pass of onnxcustom: a model as a function with `forward` and `backward`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import numpy as np
from onnx import ModelProto

from refgrad.backends import Prepared, get_backend
from refgrad.compat.training.arrays import Coefficients, array_from, executor
from refgrad.errors import FeedError, NotTrainedError, OptionError, UnknownNameError, choices
from refgrad.model.reading import read
from refgrad.protos.types import FLOATS
from refgrad.reverse.assembly import names_in
from refgrad.reverse.gradient import gradient
from refgrad.rewrites.losses import get_train_initializer
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.rewrites.split import split
from refgrad.tables.conventions import ConventionOptions

__all__ = ["OrtGradientForwardBackward", "OrtGradientForwardBackwardFunction"]

_DEVICES = {"cpu": "cpu", "CPUExecutionProvider": "cpu"} | dict.fromkeys(
    ("cuda", "cuda:0", "gpu", "CUDAExecutionProvider"), "cuda"
)


class _Session:
    """A model with the two methods of an InferenceSession that the examples of onnxcustom call."""

    def __init__(self, model: ModelProto, executor: str) -> None:
        self._model, self._executor = model, executor

    @cached_property
    def _prepared(self) -> Prepared:
        return get_backend(self._executor).prepare(self._model)

    def get_inputs(self) -> Sequence[Any]:
        """The inputs of the model; each has a `name`."""
        return self._prepared.inputs

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs called `output_names`, or all."""
        results = self._prepared.run(feeds)
        return [results[name] for name in (results if output_names is None else output_names)]


class OrtGradientForwardBackwardFunction:
    """A function: `forward` returns the outputs of the model, `backward` the derivatives by its inputs and weights."""

    _grad_input_names: ClassVar[list[str]]  # the inputs of the model and the weights, in the order of `forward`
    _input_names: ClassVar[list[str]]
    _output_names: ClassVar[list[str]]
    _weights_to_train: ClassVar[list[str]]
    _bw_fetches_names: ClassVar[list[str]]  # the derivatives, in the order of `backward`
    _trained_onnx: ClassVar[ModelProto]
    _optimized_pre_grad_model: ClassVar[ModelProto]
    _forward: ClassVar[Prepared]
    _backward: ClassVar[Prepared]
    _cotangents: ClassVar[list[str]]
    _shapes: ClassVar[dict[str, tuple[int, ...]]]  # of the weights
    _sess_eval: ClassVar[_Session]
    _onx_inp: ClassVar[list[str]]  # other names of `_grad_input_names` and `_bw_fetches_names`
    _onx_out: ClassVar[list[str]]

    def __init__(self) -> None:
        self.states_: list[dict[str, np.ndarray]] = []

    def forward(self, inputs: Sequence[Any], training: bool = False) -> list[Coefficients]:
        """The outputs of the model.

        :param inputs: the inputs and the weights, in the order of `_grad_input_names`: arrays, or OrtValues. Weights may be
            flat.
        :param training: keep the values that `backward` needs.
        :raises FeedError: the number of `inputs` is another one, or an array does not fit the model.
        """
        names = self._grad_input_names
        if len(inputs) != len(names):
            raise FeedError(f"Expected {len(names)} arrays, for {choices(names)}, got {len(inputs)}.")
        feeds = {name: array_from(value) for name, value in zip(names, inputs, strict=True)}
        feeds |= {name: _unflattened(feeds[name], shape) for name, shape in self._shapes.items()}
        results = self._forward.run(feeds)
        if training:
            self.states_.append(feeds | results)
        return [results[name].view(Coefficients) for name in self._output_names]

    def backward(self, grad_outputs: Sequence[Any]) -> list[Coefficients]:
        """The derivatives by the inputs and weights, in the order of `_bw_fetches_names`, of the last `forward` in training.

        :param grad_outputs: the derivative by each output of the model, which may be flat.
        :raises FeedError: the number of `grad_outputs` is another one, or an array does not fit the model.
        :raises NotTrainedError: there was no `forward` in training, or it has had its `backward`.
        """
        if len(grad_outputs) != len(self._cotangents):
            raise FeedError(f"Expected {len(self._cotangents)} arrays, got {len(grad_outputs)}.")
        if not self.states_:
            raise NotTrainedError("Call forward(inputs, training=True) first, once for each backward.")
        values = self.states_.pop()
        for name, output, given in zip(self._cotangents, self._output_names, grad_outputs, strict=True):
            values[name] = _unflattened(array_from(given), values[output].shape)
        wanted = {value.name for value in self._backward.inputs}
        results = self._backward.run({name: value for name, value in values.items() if name in wanted})
        return [results[name].view(Coefficients) for name in self._bw_fetches_names]


class OrtGradientForwardBackward:
    """A model as a function with `forward` and `backward`, on stock ONNX Runtime or the interpreter.

    `cls_type_` is the class of the function. It has the graphs `_optimized_pre_grad_model`, the model with its weights as
    inputs, and `_trained_onnx`, the gradient.

    :param onnx_model: a model, or the path of one.
    :param weights_to_train: names of float initializers; None for all.
    :param input_names: the inputs, in the order of `forward`; None for all.
    :param output_names: the outputs; None for all.
    :param class_name: the name of the class.
    :param providers: "cpu" or "cuda", or a list of "CPUExecutionProvider" or "CUDAExecutionProvider".
    :param enable_logging: has no effect, and neither has `debug`.
    :param backend: the executor; by default ONNX Runtime, or the interpreter where that is not installed.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`.
    :raises OptionError: an argument does not fit.
    :raises UnknownNameError: there is no such weight, input or output.

    >>> import numpy as np, onnx.parser
    >>> from refgrad.compat.training.ortgradient import OrtGradientForwardBackward
    >>> line = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] a = {1, 2}> { y = MatMul(x, a) }'
    ... )
    >>> function = OrtGradientForwardBackward(line).new_instance()
    >>> x, a = np.float32([[3, 4]]), np.float32([[1], [2]])
    >>> [y] = function.forward([x, a], training=True)
    >>> d_x, d_a = function.backward([np.ones_like(y)])
    >>> y.numpy().tolist(), d_x.numpy().tolist(), d_a.numpy().tolist()
    ([[11.0]], [[1.0, 2.0]], [[3.0], [4.0]])
    """

    def __init__(
        self,
        onnx_model: ModelProto | str | os.PathLike[str],
        weights_to_train: Sequence[str] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        class_name: str | None = None,
        providers: str | Sequence[str] | None = None,
        enable_logging: bool = False,
        debug: bool = False,
        *,
        backend: str | None = None,
        **conventions: Unpack[ConventionOptions],
    ) -> None:
        self.onnx_model = model = read(onnx_model)
        held = list(get_train_initializer(model))
        initialized = {tensor.name for tensor in model.graph.initializer}
        inputs = [value.name for value in model.graph.input if value.name not in initialized]
        self.weights_to_train = _known("weights_to_train", weights_to_train, held)
        self.input_names = _known("input_names", input_names, inputs)
        self.output_names = _known("output_names", output_names, [value.name for value in model.graph.output])
        self.class_name = class_name or "OrtGradientForwardBackwardFunction"
        self.enable_logging, self.debug, self.backend = enable_logging, debug, backend
        self.providers, self._conventions = providers, conventions
        if missing := [name for name in inputs if name not in self.input_names]:
            raise OptionError(f"input_names has all inputs, and lacks {choices(missing)}.")
        names = [providers or "cpu"] if isinstance(providers, str | None) else list(providers)
        if unknown := [name for name in names if name not in _DEVICES]:
            raise OptionError(f"There is no provider {unknown[0]!r}; there are {choices(_DEVICES)}.")
        self._executor = executor(_DEVICES[names[0]], backend)
        self._make_class()

    def _make_class(self) -> None:
        weights, inputs, outputs = self.weights_to_train, self.input_names, self.output_names
        kinds = {value.name: value.type.tensor_type.elem_type for value in self.onnx_model.graph.input}
        wrt = [*(name for name in inputs if kinds[name] in FLOATS), *weights]
        made = gradient(self.onnx_model, wrt, outputs, keep_outputs=True, weights="inputs", **self._conventions)
        parts = split(self.onnx_model, wrt, outputs, weights="inputs", **self._conventions)
        cotangents, gradients = names_in(made)
        backend = get_backend(self._executor)
        held = get_train_initializer(self.onnx_model)
        without_gradient = select_model_inputs_outputs(made, outputs, [*inputs, *weights])
        attributes = {
            "_grad_input_names": [*inputs, *weights],
            "_input_names": inputs,
            "_output_names": outputs,
            "_weights_to_train": weights,
            "_bw_fetches_names": [gradients[name] for name in wrt],
            "_trained_onnx": made,
            "_optimized_pre_grad_model": without_gradient,
            "_forward": backend.prepare(parts.forward),
            "_backward": backend.prepare(parts.backward),
            "_cotangents": [cotangents[name] for name in outputs],
            "_shapes": {name: held[name][0].shape for name in weights},
            "_sess_eval": _Session(without_gradient, self._executor),
            "_onx_inp": [*inputs, *weights],
            "_onx_out": [gradients[name] for name in wrt],
        }
        self.cls_type_: type[OrtGradientForwardBackwardFunction] = type(
            self.class_name, (OrtGradientForwardBackwardFunction,), attributes
        )

    def new_instance(self) -> OrtGradientForwardBackwardFunction:
        """A function, with a memory of its own for `backward`."""
        return self.cls_type_()

    def get_initializer(self, name: str, exc: bool = True) -> np.ndarray | None:
        """The value of a float initializer. If there is none, None, or an error with `exc`.

        :raises UnknownNameError: there is none.
        """
        held = get_train_initializer(self.onnx_model)
        if name not in held and exc:
            raise UnknownNameError(f"{name!r} is no float initializer. There are: {choices(held)}.")
        return held[name][0] if name in held else None

    def __repr__(self) -> str:
        """The class."""
        return f"{type(self).__name__}(...)"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "cls_type_"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_class()


def _unflattened(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array in a shape. It is unchanged if it has more than one axis with several elements, or another size."""
    is_flat = sum(size != 1 for size in array.shape) <= 1
    return array.reshape(shape) if is_flat and array.size == math.prod(shape) else array


def _known(what: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The names, which `known` has; None stands for all of `known`."""
    chosen = list(known) if names is None else list(names)
    if unknown := [name for name in chosen if name not in known]:
        raise UnknownNameError(f"{unknown[0]!r} in {what} is unknown. There are: {choices(known)}.")
    if not chosen:
        raise OptionError(f"{what} is empty.")
    return chosen

"""`refgrad.torch.Module`: an ONNX model as a layer of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from onnx import ModelProto, ValueInfoProto, helper
from torch import Tensor, nn

from refgrad.backends import available, get_backend
from refgrad.backends.base import Value, check_shape, describe, load_model
from refgrad.backends.onnxruntime import SLEEPING, CpuBackend
from refgrad.errors import FeedError, InvalidModelError, OptionError, choices, did_you_mean
from refgrad.escaping import printable
from refgrad.model.external import array_of
from refgrad.model.reading import read
from refgrad.model.writing import save_made
from refgrad.protos.traverse import fresh, names_of, refill
from refgrad.protos.types import FLOATS, type_text
from refgrad.rewrites.selection import select_model_inputs_outputs
from refgrad.tables.conventions import ConventionOptions
from refgrad.torch.calls import OF_TORCH, ModelFunction, ModuleSettings, array_in, from_array, torch_type
from refgrad.training.dropout import holds_dropout, with_masks
from refgrad.training.normalization import (
    Statistic,
    holds_batch_norm,
    in_inference_mode,
    in_training_mode,
    with_following,
)
from refgrad.training.step import BATCH_NORMS, DROPOUTS, trained
from refgrad.training.training import written_back

_MOST = 2**31 - 1  # of the numbers that say what Dropout drops


class Module(nn.Module):
    """An ONNX model as a layer: its weights are parameters, and autograd differentiates it to any order.

    It is called with a tensor for each input, in the order of the model or by name, and returns the output, or a tuple of the
    outputs in their order. Sizes that the model does not fix may change from call to call. It begins in eval mode, as files are
    for inference; after `train()`, BatchNormalization takes the statistics of the batch and moves the running ones, which are
    buffers, and Dropout drops by torch's generator.

    Parameters have the names of the initializers: where a name has dots, `get_submodule` finds the parts of it, and the keys of
    `state_dict()` are the names. Initializers that are not trainable stay constants of the graph, where runtimes fold them.

    :param model: a model, or the path of one. It is not modified.
    :param trainable: which float initializers become parameters: names, or patterns of parameters (`head.*`); by default all
        that `refgrad.weights` calls parameters, or the adapters that `refgrad.training.lora` added. False: none.
    :param outputs: the outputs to return; by default all.
    :param backend: what runs it: "ort-cpu", "ort-cuda", "numpy", or another one that is installed; by default ONNX Runtime
        where that is installed.
    :param options: options of the executor, such as {"threads": 1}. ONNX Runtime has as many threads as torch, and they do not
        spin between calls, unless {"config": {"session.intra_op.allow_spinning": "1"}} says so.
    :param recompute: as `memory`, see `refgrad.gradient`: less memory, more time.
    :param batch_norm: "training", or "frozen": as in eval mode, whatever the mode.
    :param dropout: "training", or "off": as in eval mode.
    :param conventions: `kinks`, `quantization` and the other conventions of `refgrad.gradient`; `kinks` is "torch" by default.
    :raises InvalidModelError: the model cannot be read, or has an input or output that is no tensor of numbers.
    :raises UnknownNameError: a name that does not exist, or nothing is trainable.
    :raises OptionError: an option has a value that there is not.
    :raises BackendError: the executor is not installed, or cannot run the model.

    >>> import onnx.parser, torch
    >>> from refgrad.torch import Module
    >>> layer = Module(onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["": 21]> layer (float[N, 2] x) => (float[N, 1] y) '
    ...     '<float[2, 1] weight = {1, 2}> { p = MatMul(x, weight)  y = Tanh(p) }'), backend="numpy")
    >>> layer(torch.zeros(3, 2)).sum().backward()
    >>> dict(layer.named_parameters())["weight"].grad.shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        model: ModelProto | str | os.PathLike[str],
        trainable: Sequence[str] | bool | None = None,
        *,
        outputs: Sequence[str] | None = None,
        backend: str | None = None,
        options: Mapping[str, Any] | None = None,
        recompute: bool | Sequence[str] = False,
        memory: str | None = None,
        batch_norm: str = "training",
        dropout: str = "training",
        **conventions: Unpack[ConventionOptions],
    ) -> None:
        super().__init__()
        for what, value, known in (
            ("batch_norm", batch_norm, BATCH_NORMS),
            ("dropout", dropout, DROPOUTS),
        ):
            if value not in known:
                raise OptionError(f"There is no {what} {value!r}; there are {choices(known)}.")
        executor = get_backend(backend or ("ort-cpu" if "ort-cpu" in available() else "numpy"))
        given_options = dict(options or {})
        if isinstance(executor, CpuBackend):
            given_options = (
                {"threads": torch.get_num_threads()}
                | given_options
                | {"config": SLEEPING | dict(given_options.get("config") or {})}
            )
        self._settings = ModuleSettings(
            executor,
            given_options,
            recompute if isinstance(recompute, bool) else tuple(recompute),
            memory,
            replace(OF_TORCH, **conventions),
        )
        self._source = model if isinstance(model, ModelProto) else Path(model)
        self._frozen, self._drops = batch_norm == "frozen", dropout == "training"
        whole = load_model(model)
        weights: dict[str, np.ndarray] = {}
        self._model = whole
        if trainable is not False:
            trained_model, weights = trained(whole, None if trainable is True else trainable)
            self._model = read(trained_model)
        self._model = in_inference_mode(self._model)
        if outputs is not None:
            fed = [value.name for value in self._model.graph.input]
            self._model = select_model_inputs_outputs(self._model, outputs, fed)
        held = {tensor.name: tensor for tensor in self._model.graph.initializer}
        self.inputs = tuple(_described(value, "input") for value in self._model.graph.input if value.name not in held)
        self.outputs = tuple(_described(value, "output") for value in self._model.graph.output)
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for key, array in weights.items():
            if key in held:
                self._hold(key, nn.Parameter(from_array(np.array(array))))
        self._moving: tuple[ModelProto, ModelProto, list[Statistic]] | None = None
        self._refusal: OptionError | None = None
        if not self._frozen and holds_batch_norm(self._model):
            try:
                self._moving = in_training_mode(self._model)
            except OptionError as error:  # for those who train it
                self._refusal = error
            else:
                for statistic in self._moving[2]:
                    self._hold(statistic.name, from_array(np.array(array_of(held[statistic.name]))))
        self._modes: dict[bool, _Mode] = {}
        self.eval()

    def _hold(self, name: str, tensor: Tensor) -> None:
        """Register a parameter or a buffer where the dots in its name say.

        It is put where torch looks it up: the name may be the name of a method, such as "forward" or "type".
        """
        place: nn.Module = self
        *inner, last = name.split(".")
        for part in inner:
            if place._modules.get(part) is None:
                place._modules[part] = nn.Module()
            place = place._modules[part]
        (place._parameters if isinstance(tensor, nn.Parameter) else place._buffers)[last] = tensor
        self._places[name] = place, last

    def train(self, mode: bool = True) -> Module:
        """Let BatchNormalization and Dropout do what they do in a training, or what they do in use.

        :raises OptionError: the model has one without a training mode: in a body or a function, with a statistic that is no
            initializer of its own, or of an opset that is too old. `batch_norm="frozen"` and `dropout="off"` leave them as they
            are.
        """
        if mode:
            self._mode(True)
        super().train(mode)
        return self

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The output of the model, or its outputs, for a tensor for each input, in the order of the model or by name.

        :raises FeedError: an input is missing or given twice, or a tensor has another type, shape or device than the model has.
        :raises BackendError: the executor fails.
        """
        mode = self._mode(self.training)
        bound = self._bound(tensors, named)
        for name in self._places:
            # a statistic moves before the backward pass, which may read it
            tensor = self._tensor(name)
            bound.append(tensor.clone() if name in mode.moved else tensor)
        if mode.step:
            bound.append(torch.randint(_MOST, (), device="cpu"))
        symbols: dict[str, tuple[int, str]] = {}
        known = mode.function.known(bound)
        unseen = bound if known is None else bound[: len(self.inputs)]
        for value, tensor in zip(mode.function.inputs, unseen, strict=False):
            self._check(tensor, value, symbols)
        results = mode.function(bound, known)
        by_name = dict(zip(mode.function.outputs, results, strict=True))
        with torch.no_grad():
            for name, output in mode.moved.items():
                self._tensor(name).copy_(by_name[output])
        returned = tuple([by_name[value.name] for value in self.outputs])
        return returned[0] if len(returned) == 1 else returned

    def save(self, path: str | os.PathLike[str]) -> ModelProto:
        """Write the model with the weights, and the running statistics, that it has reached, for inference; and return it.

        It is the model of the file that was given, with all its outputs, as `refgrad.write_back` makes it. Weights that were
        lifted out of attributes are attributes again.

        :raises OutputFileError: the file cannot be written, or is the one that was read.
        """
        saved = self.to_onnx()
        save_made(saved, path, self._source)
        return saved

    def to_onnx(self) -> ModelProto:
        """The ONNX model with the weights, and the running statistics, that it has reached, for inference."""
        values = {name: array_in(self._tensor(name)) for name in self._places}
        statistics = {statistic.name for statistic in self._moving[2]} if self._moving else set()
        weights = {name: value for name, value in values.items() if name not in statistics}
        return written_back(self._source, weights, {name: values[name] for name in statistics})

    def _tensor(self, name: str) -> Tensor:
        """The parameter or buffer of this name, or what torch computes in its place, as its pruning does.

        :raises FeedError: there is none any more.
        """
        place, last = self._places[name]
        tensor = place._parameters.get(last)
        if tensor is None:
            tensor = place._buffers.get(last)
        if tensor is None:
            tensor = getattr(place, last, None)
        if isinstance(tensor, Tensor):
            return tensor
        raise FeedError(f"The module has lost {name!r}, which the model reads. Set it again, to a tensor.")

    def extra_repr(self) -> str:
        """The file, the inputs and the outputs, and what runs it."""
        where = "" if isinstance(self._source, ModelProto) else f"{str(self._source)!r}, "
        named = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return printable(f"{where}({named[0]}) -> ({named[1]}), backend={self._settings.backend.name!r}")

    def _mode(self, training: bool) -> _Mode:
        if training not in self._modes:
            self._modes[training] = self._made(training)
        return self._modes[training]

    def _made(self, training: bool) -> _Mode:
        """The model of a mode as a function: weights and running statistics are inputs of it."""
        if training and self._refusal is not None:
            raise OptionError(f"{self._refusal}")
        moved, step, model = dict[str, str](), "", ModelProto()
        if self._moving is None:
            model.CopyFrom(self._model)
        elif training:
            model.CopyFrom(self._moving[0])
            moved = with_following(model, self._moving[2], unbiased=True)
        else:
            model.CopyFrom(self._moving[1])
        if training and self._drops and holds_dropout(model):
            step = fresh("dropout_step", names_of(model.graph))
            model = with_masks(model, step, 0)
        held = {tensor.name: tensor for tensor in model.graph.initializer}
        declared = {value.name: value for value in model.graph.input}
        fed = [declared.pop(value.name) for value in self.inputs]
        for name in self._places:
            tensor = held.pop(name, None)
            fed.append(
                declared[name]
                if tensor is None
                else helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            )
        refill(model.graph.input, [*fed, *([declared[step]] if step else ())])
        refill(model.graph.initializer, held.values())
        floats = {value.name for value in model.graph.output if value.type.tensor_type.elem_type in FLOATS}
        targets = [value.name for value in self.outputs if value.name in floats]
        weights = slice(len(self.inputs), len(fed))
        return _Mode(ModelFunction(model, self._settings, targets, weights), moved, step)

    def _bound(self, tensors: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors that the inputs are fed, in the order of the inputs."""
        if len(tensors) == len(self.inputs) and not named:
            return list(tensors)
        names = [value.name for value in self.inputs]
        if len(tensors) > len(names):
            raise FeedError(
                f"The model has {len(names)} inputs ({choices(names)}), and {len(tensors)} tensors are given."
            )
        bound = dict(zip(names, tensors, strict=False))
        for name, tensor in named.items():
            if name not in names:
                raise FeedError(
                    f"The model has no input {name!r}.{did_you_mean(name, names)} Its inputs are {choices(names)}."
                )
            if name in bound:
                raise FeedError(f"Input {name!r} is given twice, by its place and by its name.")
            bound[name] = tensor
        if missing := [value for value in self.inputs if value.name not in bound]:
            raise FeedError(f"No tensor for {', '.join(map(str, missing))}.")
        return [bound[name] for name in names]

    def _check(self, tensor: Tensor, value: Value, symbols: dict[str, tuple[int, str]]) -> None:
        what = "Parameter" if value.name in self._places else "Input"
        if not isinstance(tensor, Tensor):
            raise FeedError(f"{what} {value.name!r} is a tensor of torch, not {type(tensor).__name__}.")
        if tensor.dtype != torch_type(value.dtype):
            raise FeedError(
                f"{what} {value} is given as {tensor.dtype}. The graph computes in the types that it has: give "
                f".to({torch_type(value.dtype)}), or export the model in {tensor.dtype}."
            )
        device = "cuda" if self._settings.backend.name == "ort-cuda" else "cpu"
        if tensor.device.type != device:
            raise FeedError(
                f"{what} {value.name!r} is on {tensor.device}, and the executor {self._settings.backend.name!r} runs on "
                f"{device}. Move it there, or take another executor for the module."
            )
        if value.shape is not None:
            check_shape(tuple(tensor.shape), value, symbols)


class _Mode(NamedTuple):
    """A model in training or in use: the outputs that have the next running statistics, and the input that Dropout draws by."""

    function: ModelFunction
    moved: dict[str, str]
    step: str


def _described(value: ValueInfoProto, what: str) -> Value:
    """The description of an input or output.

    :raises InvalidModelError: it is no tensor of a type that torch has.
    """
    described = describe(value)
    if described.kind == "tensor" and torch_type(described.dtype) is not None:
        return described
    kind = type_text(value.type) if described.kind == "tensor" else f"a {described.kind}"
    advice = "Name the outputs to return in outputs" if what == "output" else "Take the part of the model behind it"
    raise InvalidModelError(
        f"{what.capitalize()} {value.name!r} is {kind}, and a module takes and returns tensors of numbers. {advice} "
        "(refgrad.select_model_inputs_outputs)."
    )

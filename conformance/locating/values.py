"""The right values of a model: the values of the interpreter in double, each rounded to its own type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from refgrad.backends.numpy import NumpyBackend
from refgrad.conformance.judge.nan.watching import Compute, Watcher, Watching, WatchingInDouble, constants_of
from refgrad.model.external import array_of
from refgrad.model.inlining.inline import inline_functions
from refgrad.protos.traverse import reads_of


def without_functions(model: ModelProto) -> ModelProto:
    """The model with its functions written out: a copy, or the model itself if it has none."""
    if not model.functions:
        return model
    copied = ModelProto()
    copied.CopyFrom(model)
    return inline_functions(copied)


class ModelValues:
    """The values of a model at some feeds, those in bodies not counted.

    :param model: a model, which is not modified. Functions are written out in `self.model`.
    :param feeds: the values of its inputs, by name.
    :raises InvalidModelError: the model cannot be read.
    :raises FeedError: the feeds do not fit the model.
    :raises BackendError: the interpreter does not run it.
    """

    def __init__(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        self.model = without_functions(model)
        self.feeds = dict(feeds)
        self.constants = constants_of(self.model) - set(feeds)
        self._held: dict[str, Any] = {tensor.name: array_of(tensor) for tensor in self.model.graph.initializer}
        self._held |= feeds
        made = [name for node in self.model.graph.node for name in node.output if name]
        declared: dict[str, Any] = {}  # the type of each array, and every other value itself
        of_graph = frozenset(made)

        def look(node: NodeProto, results: tuple[Any, ...]) -> None:
            for name, value in zip(node.output, results, strict=False):
                if name in of_graph:
                    declared[name] = value.dtype if isinstance(value, np.ndarray | np.generic) else value

        def hold(node: NodeProto, results: tuple[Any, ...]) -> None:
            for name, value in zip(node.output, results, strict=False):
                if name in of_graph:
                    self._held[name] = _rounded(value, declared.get(name))

        read = {name for node in self.model.graph.node for name in reads_of(node)}
        wanted = [*(value.name for value in self.model.graph.output), *(name for name in made if name not in read)]
        for precision in (Watching(watching_each(look)), WatchingInDouble(watching_each(hold))):
            NumpyBackend().prepare(self.model, precision=precision).run(feeds, dict.fromkeys(wanted))

    def right(self, name: str) -> Any:
        """The right value of this name, in its type; None if there is no value of this name."""
        return self._held.get(name)

    def tensor(self, name: str) -> np.ndarray:
        """The right value of a tensor.

        :raises LookupError: the value is not a tensor.
        """
        value = self.right(name)
        if not isinstance(value, np.ndarray):
            raise LookupError(f"{name!r} is no tensor")
        return value

    def part(self, nodes: Sequence[NodeProto], wanted: Collection[str]) -> tuple[ModelProto, dict[str, np.ndarray]]:
        """These nodes as a model of their own, and what it is fed; constants stay constants, and all sizes are known.

        :param wanted: what may be an output, if the nodes make it.
        :raises LookupError: it reads or makes something that is no tensor.
        """
        source = self.model
        made = ModelProto(ir_version=source.ir_version)
        made.opset_import.extend(source.opset_import)
        made.graph.name = "part"
        made.graph.node.extend(nodes)
        own = dict.fromkeys(name for node in nodes for name in node.output if name)
        feeds: dict[str, np.ndarray] = {}
        for name in dict.fromkeys(name for node in nodes for name in reads_of(node) if name not in own):
            value = self.tensor(name)
            if name in self.constants:
                made.graph.initializer.append(numpy_helper.from_array(value, name))
            else:
                feeds[name] = value
                made.graph.input.append(described(name, value))
        made.graph.output.extend(described(name, self.tensor(name)) for name in own if name in wanted)
        made.graph.value_info.extend(v for v in source.graph.value_info if v.name in own and v.name not in wanted)
        return made, feeds


def described(name: str, value: np.ndarray) -> ValueInfoProto:
    """The declaration of an input or output with this value."""
    return helper.make_tensor_value_info(name, kind_of(value), value.shape)


def kind_of(value: np.ndarray) -> int:
    """The type of a tensor by ONNX's number."""
    return TensorProto.STRING if is_text(value) else int(helper.np_dtype_to_tensor_dtype(value.dtype))


def is_text(value: np.ndarray) -> bool:
    """True if a tensor holds texts."""
    return value.dtype.kind in "OUST"


def watching_each(seen: Callable[[NodeProto, tuple[Any, ...]], None]) -> Watcher:
    """A watcher that passes each node of a run and its results to `seen`."""

    def watch(node: NodeProto, inputs: tuple[Any, ...], outer: Mapping[str, Any], compute: Compute) -> tuple[Any, ...]:
        results = compute()
        seen(node, results)
        return results

    return watch


def _rounded(due: Any, declared: Any) -> Any:
    """A value in the type that the model declares."""
    if not isinstance(declared, np.dtype) or not isinstance(due, np.ndarray | np.generic):
        return declared
    return np.asarray(due).astype(declared) if due.dtype != declared else np.asarray(due)

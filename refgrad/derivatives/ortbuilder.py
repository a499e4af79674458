"""ONNX Runtime's own gradient builders, called in another process, because they may abort or run for very long.

There are two. "raw" is GradientGraphBuilder: it differentiates one output of a graph. "module" is OrtModuleGraphBuilder: it
optimises the graph first, then differentiates all outputs. Only the training wheels have them (onnxruntime-training-cpu,
onnxruntime-training; the last release of both is 1.19.2).

`build_raw` and `build_module` build one gradient. `Builders` builds many in one process, which saves the starts of processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib import util
from types import TracebackType
from typing import Any

import onnx
from onnx import ModelProto, TensorProto, helper

from refgrad.errors import BuilderError, WorkerError
from refgrad.installing import install
from refgrad.model import native
from refgrad.model.normalise import normalise
from refgrad.protos.messages import is_too_large
from refgrad.protos.traverse import versions_of
from refgrad.worker import SECONDS, Worker

_IR_VERSION, _OPSET = 10, 21  # the newest versions that 1.19.2 reads


def available() -> bool:
    """True if the installed onnxruntime has gradient builders."""
    if util.find_spec("onnxruntime") is None:
        return False
    from onnxruntime.capi import _pybind_state

    return hasattr(_pybind_state, "GradientGraphBuilder")


def require() -> None:
    """Raise an error if there are no gradient builders.

    :raises BuilderError: the installed onnxruntime has no gradient builder.
    """
    if not available():
        raise BuilderError(
            "missing",
            "This onnxruntime has no gradient builder. Install onnxruntime-training-cpu==1.19.2 in an environment "
            f"without any other onnxruntime: {install('ort-training')}.",
        )


def build_raw(model: ModelProto, wrt: Iterable[str], output: str, seconds: float = SECONDS) -> ModelProto:
    """`Builders.raw` in a process that ends with the call."""
    with Builders(seconds) as builders:
        return builders.raw(model, wrt, output)


def build_module(
    model: ModelProto, inputs: Iterable[str], initializers: Iterable[str], seconds: float = SECONDS
) -> ModelProto:
    """`Builders.module` in a process that ends with the call."""
    with Builders(seconds) as builders:
        return builders.module(model, inputs, initializers)


class Builders:
    """Calls both builders in one other process. The process starts with the first call, and again after it has died.

    >>> with Builders(seconds=10) as builders:  # doctest: +SKIP
    ...     gradients = [builders.raw(model, ["x"], "y") for model in models]

    :param seconds: the time limit of one gradient, including the start of the process.
    :param in_process: call the builders in this process, which may then abort or hang.
    """

    def __init__(self, seconds: float = SECONDS, in_process: bool = False) -> None:
        self.worker = None if in_process else Worker(seconds)

    def raw(self, model: ModelProto, wrt: Iterable[str], output: str) -> ModelProto:
        """The gradient by GradientGraphBuilder: of one output, in the graph as it is.

        :param wrt: inputs and initializers. `output` must depend on each of them.
        :return: the model with one more input, `<output>_grad`, and one more output `<name>_grad` per name. Initializers in
            `wrt` stay initializers.
        :raises BuilderError: the builder refused, crashed, did not finish in time, or is not installed.
        """
        gradient = self._build(_raw, model, {"wrt": list(wrt), "output": output})
        return _with_cotangent(gradient, model, output)

    def module(self, model: ModelProto, inputs: Iterable[str], initializers: Iterable[str]) -> ModelProto:
        """The gradient by OrtModuleGraphBuilder: of all outputs, after optimisations of the forward graph.

        :param inputs: the inputs that require a gradient.
        :param initializers: the initializers to train. They become inputs, after the inputs of the model.
        :return: the model as the builder returns it. One node com.microsoft.YieldOp takes all outputs and returns their
            cotangents `<output>_grad`. The outputs are `<name>_grad`, first for `inputs`, then for `initializers`.
        :raises BuilderError: the builder refused, crashed, did not finish in time, or is not installed.
        """
        return self._build(_module, model, {"inputs": list(inputs), "initializers": list(initializers)})

    def optimized(self, model: ModelProto, inputs: Iterable[str], initializers: Iterable[str]) -> ModelProto:
        """The forward graph that `module` differentiates: the optimised `model`, with the trained weights as inputs.

        :raises BuilderError: the builder refused, crashed, did not finish in time, or is not installed.
        """
        return self._build(_optimized, model, {"inputs": list(inputs), "initializers": list(initializers)})

    def close(self) -> None:
        """End the process, if there is one."""
        if self.worker is not None:
            self.worker.close()

    def __enter__(self) -> Builders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self, builder: Callable[..., bytes], model: ModelProto, arguments: dict[str, Any]) -> ModelProto:
        require()
        lowered = readable(model)
        if is_too_large(lowered):
            raise BuilderError("refused", "models over 2 GB cannot be passed to the builder")
        try:
            if self.worker is None:
                gradient = builder(lowered.SerializeToString(), **arguments)
            else:
                gradient = self.worker.call(builder, lowered.SerializeToString(), **arguments)
        except WorkerError as error:
            verdict = "refused" if error.verdict == "raised" else error.verdict
            raise BuilderError(verdict, _without_origin(str(error))) from error
        except Exception as error:
            if not _is_refusal(error):
                raise
            raise BuilderError("refused", _without_origin(" ".join(str(error).split()))) from error
        return onnx.load_from_string(gradient)


def _is_refusal(error: Exception) -> bool:
    """True if the exception came from ONNX Runtime: one of its classes, or a C++ exception that pybind11 translated."""
    return isinstance(error, RuntimeError | ValueError | IndexError) or type(error).__module__.startswith("onnxruntime")


def _without_origin(message: str) -> str:
    """A message of ONNX Runtime without the number of the error, or without the C++ file that raised it."""
    return re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : |^/\S+ ", "", message)


def _raw(model: bytes, wrt: list[str], output: str) -> bytes:
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    builder = GradientGraphBuilder(model, {output}, set(wrt), output)
    builder.build()
    gradient: bytes = builder.get_model()
    return gradient


def _module(model: bytes, inputs: list[str], initializers: list[str]) -> bytes:
    gradient: bytes = _module_builder(model, inputs, initializers).get_gradient_model()
    return gradient


def _optimized(model: bytes, inputs: list[str], initializers: list[str]) -> bytes:
    forward: bytes = _module_builder(model, inputs, initializers).get_forward_model()
    return forward


def _module_builder(model: bytes, inputs: list[str], initializers: list[str]) -> Any:
    from onnxruntime.capi import _pybind_state as library

    options = library.OrtModuleGraphBuilderConfiguration()
    options.initializer_names = options.initializer_names_to_train = initializers
    options.input_names_require_grad = inputs
    options.build_gradient_graph = True
    builder = library.OrtModuleGraphBuilder()
    builder.initialize(model, options)
    builder.build(library.TrainingGraphTransformerConfiguration())
    return builder


def depends_on(model: ModelProto, output: str) -> set[str]:
    """The names of all values that `output` is computed from."""
    needed = {output}
    for node in reversed(normalise(model).nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.reads)
    return needed


def readable(model: ModelProto) -> ModelProto:
    """A copy of `model` that 1.19.2 can read. A newer IR version or opset is lowered."""
    opset = versions_of(model).get("", 1)
    if opset > _OPSET and not _same_operators(model, opset):
        try:
            lowered = native.convert_version(model, _OPSET)
        except native.ConvertError as error:
            raise BuilderError("refused", f"opset {opset} cannot be converted to {_OPSET}: {error}") from error
    else:
        lowered = ModelProto()
        lowered.CopyFrom(model)
    for imported in lowered.opset_import:
        if imported.domain in ("", "ai.onnx"):
            imported.version = min(imported.version, _OPSET)
    lowered.ir_version = min(lowered.ir_version, _IR_VERSION)
    _name_nodes(lowered)
    return lowered


def _name_nodes(model: ModelProto) -> None:
    """Give every node a unique name. 1.19.2 derives names from them, and refuses nodes of the same name."""
    taken: set[str] = set()
    for position, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_{position}"
            while node.name in taken:
                node.name += "_"
        taken.add(node.name)


def _same_operators(model: ModelProto, opset: int) -> bool:
    """True if the newest opset that 1.19.2 reads has the same operators, except for their types.

    :param opset: the opset of the model.
    """
    for node in model.graph.node:
        if node.domain or not onnx.defs.has(node.op_type):
            continue
        new = onnx.defs.get_schema(node.op_type, opset)
        try:
            old = onnx.defs.get_schema(node.op_type, _OPSET)
        except onnx.defs.SchemaError:
            return False
        if {a.name for a in node.attribute} - set(old.attributes) or len(node.input) > old.max_input:
            return False
        if [p.name for p in new.inputs[: len(node.input)]] != [p.name for p in old.inputs[: len(node.input)]]:
            return False
    return True


def _with_cotangent(gradient: ModelProto, model: ModelProto, output: str) -> ModelProto:
    """Replace the cotangent that the builder writes, an initializer that is a scalar 1, by an input."""
    graph = gradient.graph
    cotangent = f"{output}_grad"
    others: Sequence[TensorProto] = [t for t in graph.initializer if t.name != cotangent]
    del graph.initializer[:]
    graph.initializer.extend(others)
    declared = next(v for v in model.graph.output if v.name == output).type.tensor_type
    if cotangent not in {v.name for v in graph.input}:
        graph.input.append(helper.make_tensor_value_info(cotangent, declared.elem_type, None))
    return gradient

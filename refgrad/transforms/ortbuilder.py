"""ONNX Runtime's own gradient builders, in a process of their own: they can abort, and they can run for very long.

Only the training wheels have them (onnxruntime-training-cpu, onnxruntime-training; the last release of both is 1.19.2).
`build_raw` and `build_module` build one gradient; `Builders` builds many in one process, which saves its start.
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
from refgrad.forward.normalise import normalise
from refgrad.protos import native
from refgrad.protos.walk import versions_of
from refgrad.worker import SECONDS, Worker

_IR_VERSION, _OPSET = 10, 21  # the newest that 1.19.2 reads
_PROTOBUF_LIMIT = 2**31 - 1


def available() -> bool:
    """True if the installed onnxruntime has gradient builders."""
    if util.find_spec("onnxruntime") is None:
        return False
    from onnxruntime.capi import _pybind_state

    return hasattr(_pybind_state, "GradientGraphBuilder")


def require() -> None:
    """Refuse to go on without gradient builders.

    :raises BuilderError: the installed onnxruntime has none.
    """
    if not available():
        raise BuilderError(
            "missing",
            "This onnxruntime has no gradient builder. Install onnxruntime-training-cpu==1.19.2 in an environment "
            "without any other onnxruntime (pip install 'refgrad[ort-training]').",
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
    """Both builders behind one process, which is started when it is needed and again after it died.

    >>> with Builders(seconds=10) as builders:  # doctest: +SKIP
    ...     gradients = [builders.raw(model, ["x"], "y") for model in models]

    :param seconds: how long one gradient may take, the start of the process included.
    :param here: call them in this process, which may then abort or hang: for a caller with a process to spare.
    """

    def __init__(self, seconds: float = SECONDS, here: bool = False) -> None:
        self.worker = None if here else Worker(seconds)

    def raw(self, model: ModelProto, wrt: Iterable[str], output: str) -> ModelProto:
        """GradientGraphBuilder: the gradient of one output by the rules of the registry, on the graph as it is.

        :param wrt: inputs and initializers, each of which `output` must depend on.
        :return: the model with one more input, `<output>_grad`, and one more output `<name>_grad` per name. Trained
            weights stay initializers.
        :raises BuilderError: it refused, crashed, did not finish in time, or is not installed.
        """
        made = self._build(_raw, model, {"wrt": list(wrt), "output": output})
        return _with_cotangent(made, model, output)

    def module(self, model: ModelProto, inputs: Iterable[str], initializers: Iterable[str]) -> ModelProto:
        """OrtModuleGraphBuilder: it optimises the forward graph first, then differentiates all outputs at once.

        :param inputs: the inputs that require a gradient.
        :param initializers: the initializers to train; they become inputs, after the inputs of the model.
        :return: the model as it was made: all outputs go through one com.microsoft.YieldOp, which returns their
            cotangents `<output>_grad`; the outputs are `<name>_grad`, of `inputs` and then of `initializers`.
        :raises BuilderError: it refused, crashed, did not finish in time, or is not installed.
        """
        return self._build(_module, model, {"inputs": list(inputs), "initializers": list(initializers)})

    def optimized(self, model: ModelProto, inputs: Iterable[str], initializers: Iterable[str]) -> ModelProto:
        """The forward graph that `module` differentiates: `model` after its optimisations, with the trained weights as inputs.

        :raises BuilderError: it refused, crashed, did not finish in time, or is not installed.
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
        if lowered.ByteSize() > _PROTOBUF_LIMIT:
            raise BuilderError("refused", "models over 2 GB cannot be handed to it")
        try:
            if self.worker is None:
                made = builder(lowered.SerializeToString(), **arguments)
            else:
                made = self.worker.call(builder, lowered.SerializeToString(), **arguments)
        except WorkerError as error:
            verdict = "refused" if error.verdict == "raised" else error.verdict
            raise BuilderError(verdict, _without_origin(str(error))) from error
        except Exception as error:
            if not _is_refusal(error):
                raise
            raise BuilderError("refused", _without_origin(" ".join(str(error).split()))) from error
        return onnx.load_from_string(made)


def _is_refusal(error: Exception) -> bool:
    """True if the exception is a refusal of ONNX Runtime: its own, or one of C++ that pybind11 translated."""
    return isinstance(error, RuntimeError | ValueError | IndexError) or type(error).__module__.startswith("onnxruntime")


def _without_origin(message: str) -> str:
    """A message of ONNX Runtime without its number and its file."""
    return re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : |^/\S+ ", "", message)


def _raw(model: bytes, wrt: list[str], output: str) -> bytes:
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    builder = GradientGraphBuilder(model, {output}, set(wrt), output)
    builder.build()
    made: bytes = builder.get_model()
    return made


def _module(model: bytes, inputs: list[str], initializers: list[str]) -> bytes:
    made: bytes = _module_builder(model, inputs, initializers).get_gradient_model()
    return made


def _optimized(model: bytes, inputs: list[str], initializers: list[str]) -> bytes:
    made: bytes = _module_builder(model, inputs, initializers).get_forward_model()
    return made


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
    """A copy of `model` that 1.19.2 can read: the version of the format, and the opset, where they are too new."""
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
    """Give every node a name of its own. From nodes without a name, 1.19.2 makes nodes of the same name, which it refuses."""
    taken: set[str] = set()
    for position, node in enumerate(model.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.name or node.op_type}_{position}"
            while node.name in taken:
                node.name += "_"
        taken.add(node.name)


def _same_operators(model: ModelProto, opset: int) -> bool:
    """True if every operator of the model is the same in the newest opset that 1.19.2 reads, apart from its types."""
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
    """Make an input of the cotangent: the builder starts from an initializer, a scalar 1."""
    graph = gradient.graph
    seed = f"{output}_grad"
    kept: Sequence[TensorProto] = [t for t in graph.initializer if t.name != seed]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    declared = next(v for v in model.graph.output if v.name == output).type.tensor_type
    if seed not in {v.name for v in graph.input}:
        graph.input.append(helper.make_tensor_value_info(seed, declared.elem_type, None))
    return gradient

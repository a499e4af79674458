"""ONNX Runtime's own gradient builder, in a process of its own: it can abort, and it can run for very long.

Only the training wheels have it (onnxruntime-training-cpu, onnxruntime-training; the last release of both is 1.19.2).
It differentiates one output, which must depend on everything asked for.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import util
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, helper

from refgrad.graph import Graph
from refgrad.protos import versions_of

SECONDS = 60.0
_IR_VERSION, _OPSET = 10, 21  # the newest that 1.19.2 reads
_PROTOBUF_LIMIT = 2**31 - 1
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


class BuilderError(Exception):
    """The builder made no gradient. `verdict` is "refused", "crashed" or "timed out"."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


def available() -> bool:
    """Whether the installed onnxruntime has gradient builders."""
    if util.find_spec("onnxruntime") is None:
        return False
    from onnxruntime.capi import _pybind_state

    return hasattr(_pybind_state, "GradientGraphBuilder")


def build(model: ModelProto, wrt: Iterable[str], output: str, seconds: float = SECONDS) -> ModelProto:
    """ONNX Runtime's gradient of `output`: a model with an input `<output>_grad` and an output `<name>_grad` per name.

    :param wrt: inputs and initializers, each of which `output` must depend on.
    :raises BuilderError: it refused, crashed, or did not finish in time.
    """
    lowered = _lowered(model)
    if lowered.ByteSize() > _PROTOBUF_LIMIT:
        raise BuilderError("refused", "models over 2 GB cannot be handed to it")
    with tempfile.TemporaryDirectory(prefix="refgrad-") as folder:
        source, target = Path(folder, "model.onnx"), Path(folder, "gradient.onnx")
        source.write_bytes(lowered.SerializeToString())
        command = [sys.executable, "-c", "from refgrad.conformance.builders import work; work()"]
        arguments = json.dumps([str(source), str(target), list(wrt), output])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                [*command, arguments], capture_output=True, text=True, timeout=seconds, env=environment, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BuilderError("timed out", f"no gradient after {seconds:g} s") from error
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        if done.returncode < 0 or (done.returncode and not done.stderr):
            raise BuilderError("crashed", f"its process ended with {done.returncode}: {message}")
        if done.returncode:
            raise BuilderError("refused", re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : |^/\S+ ", "", message))
        return _with_cotangent(onnx.load(target), model, output)


def work() -> None:
    """What the process does: build, write the graph, or print why not as the last line of stderr."""
    source, target, wrt, output = json.loads(sys.argv[1])
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    try:
        builder = GradientGraphBuilder(Path(source).read_bytes(), {output}, set(wrt), output)
        builder.build()
        builder.save(target)
    except Exception as error:  # its exceptions have no class of their own
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)


def depends_on(model: ModelProto, output: str) -> set[str]:
    """Every value that `output` is computed from."""
    needed = {output}
    for node in reversed(Graph(model).nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.reads)
    return needed


def _lowered(model: ModelProto) -> ModelProto:
    """A copy of `model` that 1.19.2 can read: the version of the format, and the opset, where they are too new."""
    opset = versions_of(model).get("", 1)
    if opset > _OPSET and not _same_operators(model, opset):
        try:
            lowered: ModelProto = onnx.version_converter.convert_version(model, _OPSET)
        except RuntimeError as error:
            raise BuilderError("refused", f"opset {opset} cannot be converted to {_OPSET}: {error}") from error
    else:
        lowered = ModelProto()
        lowered.CopyFrom(model)
    for imported in lowered.opset_import:
        if imported.domain in ("", "ai.onnx"):
            imported.version = min(imported.version, _OPSET)
    lowered.ir_version = min(lowered.ir_version, _IR_VERSION)
    return lowered


def _same_operators(model: ModelProto, opset: int) -> bool:
    """Whether no operator changed since the newest opset that 1.19.2 reads but for the types that it takes."""
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
    """The builder seeds the sweep with an initializer, a scalar 1: make it an input."""
    graph = gradient.graph
    seed = f"{output}_grad"
    kept: Sequence[TensorProto] = [t for t in graph.initializer if t.name != seed]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    declared = next(v for v in model.graph.output if v.name == output).type.tensor_type
    if seed not in {v.name for v in graph.input}:
        graph.input.append(helper.make_tensor_value_info(seed, declared.elem_type, None))
    return gradient

"""Every node of the conformance cases and of onnx's node tests, alone in a model whose inputs can be given any type."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx_tests import loaded, names

from refgrad.conformance.case import Case, qualified
from refgrad.conformance.cases import every_case
from refgrad.conformance.judge.running.nodemodels import as_array
from refgrad.tables import randomness
from refgrad.tables.schemas import find_schema

TYPES = {
    f"tensor({name})": np.dtype(kind)
    for name, kind in {
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "float": np.float32,
        "double": np.float64,
        "bool": np.bool_,
        **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    }.items()
}
SIXTEEN_BIT = (TYPES["tensor(float16)"], TYPES["tensor(bfloat16)"])
FLOATS = (*SIXTEEN_BIT, TYPES["tensor(float)"], TYPES["tensor(double)"])
_QUANTIZED = (  # their cases quantize the inputs
    *(
        "MatMulInteger16",
        "MulInteger",
        "NhwcMaxPool",
        "QLinearAdd",
        "QLinearAveragePool",
        "QLinearConcat",
        "QLinearConv",
    ),
    *("QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearReduceMean", "QLinearSigmoid"),
    *("QLinearSoftmax", "QLinearWhere", "QOrderedAttention", "QOrderedGelu", "QOrderedLayerNormalization"),
    *("QOrderedLongformerAttention", "QOrderedMatMul", "QuantizeLinear", "QuantizeWithOrder", "ReduceSumInteger"),
)
NEVER_ALONE = {  # operators with a case, none of which is a node of arrays alone
    *("ConcatFromSequence", "If", "Loop", "Optional", "Scan", "SequenceAt", "SequenceConstruct", "SequenceErase"),
    *("SequenceInsert", "SequenceMap"),
    *(f"com.microsoft.{name}" for name in _QUANTIZED),
}
RANDOM = frozenset(name for _, name in randomness.RANDOM)


@dataclass(frozen=True, eq=False)
class NodeCase:
    """A node, the opsets of its model, its operator's schema, and a value for each of its inputs."""

    name: str
    node: onnx.NodeProto
    opsets: Mapping[str, int]
    schema: Any
    values: Mapping[str, np.ndarray]

    def __str__(self) -> str:
        return self.name

    def formal(self, position: int) -> Any:
        """The schema's input at that position of the node."""
        return self.schema.inputs[min(position, len(self.schema.inputs) - 1)]

    def variables(self) -> dict[str, list[str]]:
        """The inputs by the type variable of the schema that they share."""
        found: dict[str, list[str]] = {}
        for position, name in enumerate(self.node.input):
            if name:
                found.setdefault(self.formal(position).type_str, []).append(name)
        return found

    def allowed(self, variable: str) -> list[np.dtype[Any]]:
        """The types that the schema lists for a type variable, without strings, complex numbers and float8."""
        constraints = (c for c in self.schema.type_constraints if c.type_param_str == variable)
        return [TYPES[name] for c in constraints for name in c.allowed_type_strs if name in TYPES]


def model_of(case: NodeCase, values: Mapping[str, np.ndarray], node: onnx.NodeProto | None = None) -> onnx.ModelProto:
    """A model of the node, or of `node` in its place, whose inputs are declared as `values` are and outputs not at all."""
    node = node or case.node
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for name, v in values.items()
    ]
    graph = helper.make_graph([node], "node", inputs, [onnx.ValueInfoProto(name=name) for name in node.output if name])
    opsets = [helper.make_opsetid(domain, version) for domain, version in case.opsets.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@cache
def node_tests() -> tuple[tuple[str, onnx.ModelProto, dict[str, Any]], ...]:
    """The node tests of onnx: name, model, feeds."""
    pictures = find_spec("PIL") is not None  # Pillow reads them, and is optional
    found = []
    for test in loaded().values():
        if test.model is not None and test.data_sets and (pictures or "image_decoder" not in test.name):
            inputs = zip(test.model.graph.input, test.data_sets[0][0], strict=False)
            feeds = {value.name: as_array(x) for value, x in inputs if x is not None}
            found.append((test.name, test.model, feeds))
    return tuple(found)


def models(part: slice = slice(None)) -> Iterator[tuple[str, onnx.ModelProto, dict[str, Any]]]:
    """The conformance cases but for the special ones, whose values depend on the type, then the node tests of onnx.

    Only the models in `part` of them are made.
    """
    for one in (*_ordinary(), *node_tests())[part]:
        yield (one.name, one.model, dict(one.feeds)) if isinstance(one, Case) else one


@cache
def _ordinary() -> tuple[Case, ...]:
    return tuple(case for case in every_case() if case.values != "special")


def alone(name: str, model: onnx.ModelProto, feeds: Mapping[str, Any]) -> NodeCase | None:
    """The node of a model; None of several nodes, without a schema, or where it reads or holds other things than arrays."""
    node, *others = model.graph.node
    if others and not (len(others) == 1 and list(others[0].input[1:]) == ["one_row"]):
        return None
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer} | feeds
    opsets = {imported.domain: imported.version for imported in model.opset_import}
    schema = find_schema(node.op_type, node.domain, opsets.get(node.domain, 1))
    plain = all(isinstance(values.get(i), np.ndarray) for i in node.input if i)
    if schema is None or not plain or any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute):
        return None
    return NodeCase(name, node, opsets, schema, {i: values[i] for i in node.input if i})


def node_cases(operator: str) -> Iterator[NodeCase]:
    """Each node of an operator that differs from those before in its attributes, or the shapes and types of its inputs."""
    seen = set()
    for case in (alone(*each) for each in _models_of(operator)):
        if case is None:
            continue
        node, values = case.node, case.values
        shapes = tuple((values[i].shape, str(values[i].dtype)) if i else None for i in node.input)
        attributes = tuple(sorted(a.SerializeToString() for a in node.attribute))
        key = case.schema.since_version, attributes, shapes, len(node.output)
        if key not in seen:
            seen.add(key)
            yield case


def _models_of(operator: str) -> Iterator[tuple[str, onnx.ModelProto, dict[str, Any]]]:
    for case in _ordinary():
        if case.operator == operator:
            yield case.name, case.model, dict(case.feeds)
    for name, model, feeds in node_tests():
        if qualified(model.graph.node[0]) == operator:
            yield name, model, feeds


@cache
def operators() -> tuple[str, ...]:
    """The operators that have a node in `node_cases`, known before a model is made."""
    found = {case.operator for case in every_case() if case.values != "special"} - NEVER_ALONE
    pictures = find_spec("PIL") is not None
    return tuple(sorted(found | {name for name in names()["alone"] if pictures or name != "ImageDecoder"}))


ENDED = "it ended the process"


class OnnxRuntime:
    """ONNX Runtime in a process of its own, as it can end it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any] | str:
        """The results, or what it says, or `ENDED`."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            return self._pool.submit(_run_onnxruntime, model.SerializeToString(), dict(feeds)).result(60)
        except BrokenProcessPool:
            self._pool = None
            return ENDED


ONNXRUNTIME = OnnxRuntime()


def _run_onnxruntime(model: bytes, feeds: dict[str, Any]) -> list[Any] | str:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return list(onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"]).run(None, feeds))
    except Exception as error:  # its classes have no base of their own
        return f"{type(error).__name__}: {error}"[:300]

"""Models that are changed: onnx's node tests, the suite's cases, exported models, written ones, and their gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, helper

import refgrad
from refgrad.conformance.cases import every_case
from refgrad.errors import RefgradError
from refgrad.model import native

Base = tuple[str, bytes]

_LARGEST = 20_000  # bytes of a model
_OF_GRADIENTS = 0.15  # the part of the bases that are gradients
_WRITTEN = {
    "functions": """<ir_version: 10, opset_import: ["": 21, "f": 1]>
        functions (float[N, 3] x, float[3] w, bool c) => (float[N, 3] y) {
            a = f.scaled <by = 2.0> (x, w)
            y = f.chosen (c, a, x)
        }
        <domain: "f", opset_import: ["": 21]>
        scaled <by> (x, w) => (y) { s = Constant <value_float: float = @by> () z = Mul(x, w) y = Mul(z, s) }
        <domain: "f", opset_import: ["": 21, "f": 1]>
        chosen (c, a, b) => (y) {
            y = If (c) <then_branch = t () => (u) { u = f.scaled <by: float = 3.0> (a, b) },
                        else_branch = e () => (v) { v = Tanh(b) }>
        }""",
    "loops": """<ir_version: 10, opset_import: ["": 21]>
        loops (float[4, 3] x, int64 n, bool c) => (float[3] last, float[4, 3] all) <float[3] w = {1, 2, 3}> {
            axes = Constant <value_ints = [0]> ()
            start = ReduceSum <keepdims = 0> (x, axes)
            last, all = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] row) => (float[3] t, float[3] u) {
                t, = Loop (n, c, s) <body = i (int64 k, bool d, float[3] v) => (bool e, float[3] r) {
                    e = Identity(d)
                    r = If (d) <then_branch = p () => (q) { q = Mul(v, w) }, else_branch = o () => (q2) { q2 = Sin(row) }>
                }>
                u = Add(t, row)
            }> (start, x)
        }""",
    "microsoft": """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        microsoft (float[2, 3, 4] x, float[4] b) => (float[2, 3, 4] y) <float[4] w = {1, 2, 3, 4}> {
            a = com.microsoft.BiasGelu(x, b)
            n, m, v, s = com.microsoft.SkipLayerNormalization <epsilon = 0.001> (a, x, w, b)
            q = com.microsoft.QuickGelu <alpha = 1.5> (s)
            i = Constant <value = float[4, 4] {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}> ()
            h = Gemm(i, i)
            y = com.microsoft.FusedMatMul <transB = 1> (q, h)
        }""",
    "shapes": """<ir_version: 9, opset_import: ["": 19]>
        shapes (float[B, T, 6] x, int64[2] rest) => (float[A, C, D] y) {
            s = Shape <start = 0, end = 1> (x)
            t = Concat <axis = 0> (s, rest)
            r = Reshape (x, t)
            e = ConstantOfShape <value = float[1] {0.5}> (t)
            l = Less (e, r)
            z = Where (l, r, e)
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            n = Gather <axis = 0> (t, zero)
            o = Range (zero, n, one)
            y = Gather <axis = 0> (z, o)
        }""",
}


@cache
def bases() -> tuple[tuple[Base, ...], ...]:
    """The small models, by name, in groups of which each is chosen as often."""
    from onnx.backend.test import loader  # takes longer than all of refgrad

    exported = Path(__file__).with_name("exported").glob("*.onnx")
    tests = [(test.name, test.model) for test in loader.load_model_tests(kind="node") if test.model is not None]
    groups = (
        _written(tests),
        _written(tests),
        _written((case.name, case.model) for case in every_case()),
        (*((file.stem, file.read_bytes()) for file in sorted(exported)), *_written(written().items())),
    )
    assert all(groups)
    return groups


def _written(models: Iterable[tuple[str, ModelProto]]) -> tuple[Base, ...]:
    made = ((name, model.SerializeToString()) for name, model in models)
    return tuple((name, model) for name, model in made if len(model) < _LARGEST)


def written() -> Mapping[str, ModelProto]:
    """Models with what the others lack: functions, nested bodies, sparse tensors, external data, training."""
    made = {name: native.parse_model(text) for name, text in _WRITTEN.items()}
    values, indices = helper.make_tensor("w", 1, [2], [1.0, 2.0]), helper.make_tensor("i", 7, [2], [0, 3])
    made["sparse"] = native.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> sparse (float[2, 2] x) => (float[2, 2] y) { z = Add(x, w) y = Mul(z, c) }'
    )
    made["sparse"].graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
    constant = helper.make_node("Constant", [], ["c"], sparse_value=helper.make_sparse_tensor(values, indices, [2, 2]))
    made["sparse"].graph.node.insert(0, constant)
    made["external"] = ModelProto.FromString(made["microsoft"].SerializeToString())
    tensor = made["external"].graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="weights.bin")
    made["trained"] = ModelProto.FromString(made["functions"].SerializeToString())
    training = made["trained"].training_info.add()
    training.algorithm.CopyFrom(made["functions"].graph)
    training.update_binding.add(key="w", value="y")
    annotation = made["trained"].graph.quantization_annotation.add(tensor_name="y")
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="w")
    return made


def chosen(seed: int) -> Base:
    """The base that a seed stands for: one of a group, or the gradient of one."""
    chance = random.Random(seed)
    name, model = chance.choice(chance.choice(bases()))
    if chance.random() >= _OF_GRADIENTS:
        return name, model
    make: Callable[[ModelProto], ModelProto] = chance.choice(list(_DERIVED))
    try:
        made = make(onnx.load_model_from_string(model)).SerializeToString()
    except RefgradError:
        return name, model
    return f"{_DERIVED[make]} of {name}", made if len(made) < _LARGEST else model


def _ort(model: ModelProto) -> ModelProto:
    return refgrad.gradient(model, dialect="ort")


_DERIVED: dict[Callable[[ModelProto], ModelProto], str] = {
    refgrad.gradient: "gradient",
    _ort: "gradient (ort)",
    refgrad.jvp: "jvp",
    refgrad.hvp: "hvp",
}

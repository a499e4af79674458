"""The backend "ort-cuda" against the interpreter: every operator, models of torch, sizes that change, and parts of a gradient.

Without a GPU and onnxruntime-gpu nothing here runs. With `-n 8` a case that ends its process fails by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from checking import assert_runtime, by_operator, cotangents_for, names_of
from onnx import ModelProto, helper, numpy_helper

import refgrad
from refgrad.backends import Prepared, available, get_backend
from refgrad.backends.base import load_model
from refgrad.backends.onnxruntime import CudaBackend
from refgrad.conformance import compare
from refgrad.conformance.case import Case
from refgrad.conformance.locating.sides import Live
from refgrad.conformance.problems.feeds import widened

HERE = "ort-cuda" in available()
pytestmark = pytest.mark.skipif(not HERE, reason="there is no GPU, or no onnxruntime-gpu")

ROUNDINGS = 256  # of float32 that sums in another order and fast functions explain; one of TF32 is 8192
OF_MODELS = 1e-4  # relative to the largest element of a gradient
_WRONG = {  # what ONNX Runtime 1.31.1 gets wrong on CUDA, and in which cases
    "Conv of a batch of nothing": (
        "Conv-0x4x5x6,3x4x1x1-strides=[3, 2]-static-opset21-float32",
        "ConvTranspose-0x2x4,2x3x3,3-strides=[2]-kernel_shape=[3]-static-opset21-float32",
    ),
    "MatMul of nothing": (
        "AffineGrid-0x2x3,4-static-opset20-float32",
        "DeformConv-0x2x4x5,2x2x2x3,0x12x3x3,2,0x6x3x3-offset_group=1-static-opset22-float32",
        "Resize-0x2x3x4,none,4-constant=scales-static-opset19-scales=1,1,2,2-float32",
    ),
    "ReduceSum without keepdims over an axis without elements": (
        "If-of-nothing-static-opset21-float32",
        "Loop-of-nothing-static-opset21-float32",
        "BiasGelu-0x3,3-static-opset1-float32",
        "Clip-0x3,scalar,scalar-static-opset21-float32",
        "DequantizeLinear-0x3,scalar-static-opset21-float32",
        "FastGelu-0x3,3-static-opset1-float32",
        "FusedGemm-0x3,3x2,2-activation=Relu-static-opset1-float32",
        "Gemm-0x3,3x2,2-static-opset21-float32",
        "InstanceNormalization-0x3x4,3,3-static-opset21-float32",
        "LayerNormalization-0x3,3,3-axis=-1-static-opset21-float32",
        "LinearAttentionGate-2x0x4,4,4-static-opset1-float32",
        "MatMulBnb4-2x0x5,10,1-K=5-N=4-block_size=64-quant_type=0-static-opset1-float32",
        "MatMulInteger16-0x3,3x2-static-opset1-float32",
        "MatMulNBits-0x32,3x2x8,3x2,3x1,none,3-K=32-N=3-bits=4-block_size=16-static-opset1-float32",
        "OneHot-0,scalar,2-static-opset21-float32",
        "QMoE-0x8,0x3,3x4x4,3x4,3x4,3x8x2,3x8-static-opset1-float32",
        "RMSNormalization-0x3,3-static-opset23-float32",
        "Range-scalar,scalar,scalar-static-opset21-float32",
        "Range-scalar,scalar,scalar-unknown-opset21-float32",
        "STFT-0x8x1,scalar,4-static-opset21-float32",
        "SkipLayerNormalization-0x2x3,0x2x3,3-static-opset1-float32",
        "WordConvEmbedding-0x4,2x1x3x3,2,6x3-static-opset1-float32",
    ),
    "Sum of nothing": (
        "BranchwiseRMSNorm-0x3x4,4-static-opset1-float32",
        "EngramGate-1x0x3x4,1x0x3x4,1x0x4,3x4,3x4-static-opset1-float32",
        "GatedRMSNorm-0x4,4,0x4-static-opset1-float32",
        "MRotaryEmbedding-2x0x20,3x2x0,6x3,6x3-mrope_section=[1, 1, 1]-num_heads=2-rotary_embedding_dim=6-static-opset1-"
        "float32",
        "PackedAttention-0x5,5x12,12,3x4,4-num_heads=2-static-opset1-float32",
        "SkipSimplifiedLayerNormalization-0x3x4,0x3x4,4-static-opset1-float32",
    ),
    "ends the process": (
        "DynamicQuantizeLSTM-1x0x2,1x2x8,1x2x8,1x16,none,none,none,none,1,1,1,1-hidden_size=2-static-opset1-float32",
        "LongformerAttention-0x6x8,8x24,24,0x6,8x24,24,0x6-window=1-num_heads=2-static-opset1-float32",
        "QAttention-0x3x2,2x6,6,scalar,scalar-num_heads=2-static-opset1-float32",
    ),
    "no Reciprocal in bfloat16": (
        "GroupNormalization-2x4x3,4,4-num_groups=2-stash_type=16-static-opset21-bfloat16",
        "RMSNormalization-2x3,3-stash_type=16-static-opset23-bfloat16",
    ),
}
KNOWN = {case: reason for reason, cases in _WRONG.items() for case in cases}
FOLDER = Path(os.environ.get("REFGRAD_TORCH_MODELS", ""))
ROOT = Path(__file__).parents[2]


def cases() -> Iterator[Any]:
    """The first case of each operator in each type, and the first that has an input without elements."""
    for dtype, empty in (
        ("float32", False),
        ("float64", False),
        ("float16", False),
        ("bfloat16", False),
        ("float32", True),
    ):

        def accept(case: Case, dtype: str = dtype, empty: bool = empty) -> bool:
            if dtype == "float64" and case.node.domain == "ai.onnx.ml":
                return False  # ONNX Runtime computes it in float32
            return case.dtype == dtype and empty != all(array.size for array in case.feeds.values())

        for case, *_ in by_operator(accept).values():
            reason = KNOWN.get(f"{case}-{dtype}", "")
            mark = pytest.mark.xfail(reason=reason, strict=True, run=reason != "ends the process")
            yield pytest.param(case, id=f"{case}-{dtype}", marks=[mark] if reason else [])


@cache
def _probe() -> Prepared:
    return get_backend("ort-cuda").prepare(parsed("g (float[2] x) => (float[2] y) { y = Exp (x) }"))


@pytest.fixture(autouse=True)
def usable() -> Iterator[None]:
    """After an error that the device does not recover from, nothing else in the process is judged."""
    _probe()
    yield
    try:
        _probe().run({"x": np.zeros(2, np.float32)})
    except Exception as error:  # onnxruntime's classes are private
        print(f"this test left the device unusable: {error}", flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # another worker goes on
        pytest.exit(f"a test left the device unusable: {error}", 3)


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


def seeded(model: ModelProto, feeds: dict[str, Any]) -> dict[str, Any]:
    """The feeds with random cotangents of all outputs."""
    rng = np.random.default_rng(1)
    outputs = get_backend("numpy").prepare(model).run(feeds)
    return feeds | {f"{n}_grad": rng.standard_normal(v.shape).astype(v.dtype) for n, v in outputs.items()}


def run(backend: str, model: ModelProto, values: dict[str, Any], **options: Any) -> dict[str, Any]:
    prepared = get_backend(backend).prepare(model, **options)
    return prepared.run({value.name: values[value.name] for value in prepared.inputs if value.name in values})


def assert_close(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(np.abs(value).max(initial=0)) for value in expected.values())
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        allowed = tolerance * max(float(np.abs(value).max(initial=0)), 1e-3 * largest)
        np.testing.assert_allclose(got[name], value, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("case", list(cases()) if HERE else [])
def test_the_gradient_of_an_operator(case: Case) -> None:
    outputs = get_backend("numpy").prepare(case.model, precision="float64").run(widened(case.feeds))
    cotangents = cotangents_for(case, outputs, np.random.default_rng((0, 1)))
    model = refgrad.gradient(case.model, wrt=case.wrt, outputs=list(cotangents))
    seeds = {name: cotangents[output] for output, name in names_of(model, "cotangents").items()}
    expected = get_backend("numpy").prepare(model, precision="float64").run(widened(case.feeds) | seeds)
    assert_runtime(case, model, seeds, expected, backend="ort-cuda", roundings=ROUNDINGS)


MODELS = [row["model"] for row in json.loads((ROOT / "reports" / "results" / "models.json").read_text())]


@pytest.mark.parametrize("name", [name for name in MODELS if HERE and (FOLDER / f"{name}.npz").is_file()])
def test_the_gradient_of_a_model(name: str) -> None:
    """By the input and all weights; `examples/torch_models.py` wrote it to the folder REFGRAD_TORCH_MODELS."""
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    wrt = [key.removeprefix("float32/").removesuffix("_grad") for key in arrays if key.startswith("float32/")]
    feeds = {key.partition("/")[2]: value for key, value in arrays.items() if key.startswith(("feed/", "cotangent/"))}
    gradient = refgrad.gradient(FOLDER / f"{name}.onnx", wrt=wrt, keep_outputs=True)
    exact = get_backend("numpy").prepare(gradient, precision="float64").run(feeds)
    assert_close(get_backend("ort-cuda").prepare(gradient).run(feeds), exact, OF_MODELS)


NETWORK = """network (float[N, T, 6] x, int64[N, T] ids) => (float[N, T, 4] y) {
    e = Gather (table, ids)  a = Add (x, e)  [Product] p = MatMul (a, w)  [Norm] n = LayerNormalization (p, scale)
    [Tanh] t = Tanh (n)  q = Transpose <perm = [0, 2, 1]> (t)  s = MatMul (t, q)  [Softmax] m = Softmax (s)  y = MatMul (m, t)
}"""


def network() -> ModelProto:
    model, rng = parsed(NETWORK), np.random.default_rng(0)
    shapes = {"table": (9, 6), "w": (6, 4), "scale": (4,)}
    model.graph.initializer.extend(
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in shapes.items()
    )
    return model


def fed(n: int, t: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    return {"x": rng.standard_normal((n, t, 6)).astype(np.float32), "ids": rng.integers(0, 9, (n, t))}


def test_sizes_change_from_run_to_run() -> None:
    gradient = refgrad.gradient(network(), keep_outputs=True)
    prepared = get_backend("ort-cuda").prepare(gradient)
    for n, t in ((3, 5), (1, 1), (8, 64), (3, 5), (2, 7)):
        values = seeded(network(), fed(n, t))
        assert_close(prepared.run(values), get_backend("numpy").prepare(gradient, precision="float64").run(values))


@pytest.mark.xfail(reason="Sum of nothing", strict=True)
@pytest.mark.parametrize(("n", "t"), [(0, 5), (3, 0), (0, 0)])
def test_sizes_of_zero(n: int, t: int) -> None:
    """Between two runs that have elements."""
    gradient = refgrad.gradient(network(), keep_outputs=True)
    prepared = get_backend("ort-cuda").prepare(gradient)
    for sizes in ((3, 5), (n, t), (3, 5)):
        values = seeded(network(), fed(*sizes))
        assert_close(prepared.run(values), get_backend("numpy").prepare(gradient, precision="float64").run(values))


def test_the_parts_of_a_gradient() -> None:
    parts = refgrad.split(network())
    values = seeded(network(), fed(3, 5))
    crossing = run("ort-cuda", parts.forward, values)
    found = run("ort-cuda", parts.backward, values | crossing)
    joint = refgrad.gradient(network())
    assert_close(found, get_backend("numpy").prepare(joint, precision="float64").run(values))


def test_a_loop_a_condition_and_a_sequence() -> None:
    model = parsed("""
        g (float[2, 3] x, int64 n, bool more) => (float[2, 3] y, float[4, 3] z) {
            y = Loop (n, more, x) <body = b (int64 i, bool c, float[2, 3] h) => (bool d, float[2, 3] k) {
                d = Identity (c)  t = Tanh (h)  k = Mul (t, x)
            }>
            s = SequenceConstruct (x, y)
            z = ConcatFromSequence <axis = 0> (s)
        }""")
    feeds = {
        "x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32),
        "n": np.array(4),
        "more": np.array(True),
    }
    gradient = refgrad.gradient(model, keep_outputs=True)
    values = seeded(model, feeds)
    assert_close(
        run("ort-cuda", gradient, values), get_backend("numpy").prepare(gradient, precision="float64").run(values)
    )


def test_products_are_those_of_float32() -> None:
    """ONNX Runtime would round the factors to 11 bits by itself."""
    model = parsed("g (float[256, 512] a, float[512, 256] b) => (float[256, 256] y) { y = MatMul (a, b) }")
    rng = np.random.default_rng(0)
    values = seeded(
        model, {n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (256, 512)), ("b", (512, 256)))}
    )
    gradient = refgrad.gradient(model, keep_outputs=True)
    exact = get_backend("numpy").prepare(gradient, precision="float64").run(values)
    assert_close(run("ort-cuda", gradient, values), exact, 2e-6)
    chosen = get_backend("ort-cuda").prepare(gradient, provider_options={"use_tf32": "1"})
    assert chosen._session.get_provider_options()["CUDAExecutionProvider"]["use_tf32"] == "1"  # type: ignore[attr-defined]
    assert_close(chosen.run(values), exact, 2e-3)


class Planted(CudaBackend):
    """CUDA with a Tanh that is off by a thousandth."""

    def prepare(self, model: Any, **options: Any) -> Prepared:
        made = ModelProto()
        made.CopyFrom(load_model(model))
        nodes = list(made.graph.node)
        del made.graph.node[:]
        for node in nodes:
            made.graph.node.append(node)
            if node.op_type == "Tanh":
                result, made.graph.node[-1].output[0] = node.output[0], f"{node.output[0]}_right"
                made.graph.node.append(helper.make_node("Mul", [f"{result}_right", f"{result}_factor"], [result]))
                made.graph.initializer.append(numpy_helper.from_array(np.float32(1.001), f"{result}_factor"))
        return super().prepare(made, **options)


def test_a_fault_is_found_and_a_sound_device_is_not_blamed() -> None:
    assert compare(network(), "refgrad@numpy", "refgrad@ort-cuda", fed(3, 5)).ok
    found = compare(network(), "refgrad@numpy", Live("refgrad", Planted()), fed(3, 5))
    assert not found.ok
    assert found.b.kernels is not None
    assert [one.found.operator for one in found.b.kernels.culprits] == ["Tanh"]

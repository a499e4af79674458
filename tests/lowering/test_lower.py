"""`refgrad.lower`: each operator as it is, on the interpreter and on ONNX Runtime's own kernel, and lowered on both.

The operators, their attributes and feeds are those of the tables in training_operators and training_steps, which hold the
interpreter's kernels to float64 differences. A kernel of the interpreter and a lowering share no code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import recurrent
from onnx import TensorProto, helper, numpy_helper
from runtime import RUNTIME
from training_operators import (
    CASES,
    DOUBLE,
    MICROSOFT,
    NUMPY,
    Case,
    build,
    check_equal,
    numbers,
    run_onnxruntime,
    trains,
    typed,
)
from training_steps import BY_HAND, STEPS, Step, step_model

import refgrad
from refgrad.builder.function import FunctionEmitter
from refgrad.builder.nodes import written
from refgrad.conformance.case import Case as Model
from refgrad.conformance.case import is_float
from refgrad.conformance.cases import every_case
from refgrad.derivatives.ortbuilder import Builders, depends_on
from refgrad.errors import BackendError, BuilderError, InvalidModelError, LoweringError
from refgrad.protos.traverse import graphs
from refgrad.rewrites.forms import FORMS, form
from refgrad.tables.definitions import DEFINITIONS

pytestmark = pytest.mark.slow

# A primitive may have another order of summation than the kernel: 1e-6 of the largest element, and as much in the others.
TOLERANCE = {np.float32: 1e-6, np.float64: 1e-13, np.float16: 2e-3}
POOLINGS = {"MaxPoolGrad", "AveragePoolGrad"}  # the shape of their result is declared, or that of the forward operator
NOT_LOWERED = {
    "BiasSoftmaxDropout",
    "LambOptimizer",
}


def is_plain(model: onnx.ModelProto) -> bool:
    """True if ai.onnx is the only domain, of the imports and of every node."""
    text = onnx.printer.to_text(model)
    return [o.domain for o in model.opset_import] == [""] and "com.microsoft" not in text and not model.functions


def disguise(model: onnx.ModelProto, how: str) -> onnx.ModelProto:
    """The same model with shapes that are known at run time only: dimensions, or not even the rank."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    for value in graph.output if graph.node[0].op_type not in POOLINGS else ():
        kind = value.type.tensor_type.elem_type
        value.CopyFrom(helper.make_empty_tensor_value_info(value.name))
        if graph.node[0].op_type == "ReduceAllL2":
            value.type.tensor_type.elem_type = kind
    reshapes = []
    for value in graph.input:
        if not value.type.HasField("tensor_type") or graph.node[0].op_type in POOLINGS:
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{axis}"
        if how == "rank":
            name, kind = value.name, value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(f"{name}_flat", kind, [None]))
            shape = helper.make_tensor_value_info(f"{name}_dims", TensorProto.INT64, [None])
            reshapes.append((helper.make_node("Reshape", [value.name, shape.name], [name], allowzero=1), shape))
    graph.input.extend(shape for _, shape in reshapes)
    nodes = [*(node for node, _ in reshapes), *graph.node]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return changed


def disguised(feeds: Mapping[str, Any], model: onnx.ModelProto) -> dict[str, Any]:
    """The feeds of what `disguise` returned."""
    given = {}
    for value in model.graph.input:
        name = value.name.removesuffix("_flat").removesuffix("_dims")
        if name == value.name or value.name in feeds:
            given[value.name] = feeds[value.name]
        else:
            array = feeds[name]
            given[value.name] = array.reshape(-1) if value.name.endswith("_flat") else np.array(array.shape, np.int64)
    return given


def on_numpy(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    return NUMPY.prepare(model).run(feeds)


BOTH = (on_numpy, run_onnxruntime) if RUNTIME else (on_numpy,)  # the training wheel refuses some casts of float16


def check_lowered(
    model: onnx.ModelProto,
    feeds: Mapping[str, Any],
    expected: Mapping[str, Any],
    tolerance: float,
    runtimes: tuple[Callable[..., Mapping[str, Any]], ...] = BOTH,
) -> onnx.ModelProto:
    before = model.SerializeToString()
    lowered = refgrad.lower(model)
    assert model.SerializeToString() == before
    assert is_plain(lowered)
    assert [v.name for v in lowered.graph.input] == [v.name for v in model.graph.input]
    assert [v.name for v in lowered.graph.output][: len(model.graph.output)] == [v.name for v in model.graph.output]
    for run in runtimes:
        actual = run(lowered, feeds)
        for name, value in expected.items():
            check_equal(actual[name], value, tolerance)
    return lowered


def runtimes_of(case: Case, kind: Any) -> tuple[Callable[..., Mapping[str, Any]], ...]:
    """ONNX Runtime has no double for some operators, and scales down by other lengths than the interpreter does."""
    mode = case.attrs.get("coordinate_transformation_mode")
    scales = case.other.get("scales")
    shrinks = mode == "align_corners" and scales is not None and bool((scales < 1).any())
    return (on_numpy,) if shrinks or (kind == np.float64 and case.grad not in DOUBLE) else BOTH


def check_case(case: Case, kind: Any, how: str = "") -> None:
    built = build(case)
    model, feeds = built.gradient(kind), typed(built.feeds, kind)
    expected = on_numpy(model, feeds)
    if how:
        model = disguise(model, how)
        feeds = disguised(feeds, model)
        if needs_shapes(case, how):
            with pytest.raises(LoweringError, match=r"is unknown: give its shape|is not known before it runs"):
                refgrad.lower(model)
            return
    check_lowered(model, feeds, expected, TOLERANCE[kind], runtimes_of(case, kind))


def needs_shapes(case: Case, how: str) -> bool:
    """What no operator of ai.onnx can do: a Conv of unknown rank, a scale that follows from the sizes."""
    if case.grad in ("ConvGrad", "ConvTransposeGrad"):
        return how == "rank" and not {"kernel_shape", "strides", "dilations", "pads"} & case.attrs.keys()
    return "keep_aspect_ratio_policy" in case.attrs


LOWERED = [case for case in CASES if case.grad not in NOT_LOWERED]


@pytest.mark.matrix
@pytest.mark.parametrize("case", LOWERED, ids=str)
@pytest.mark.parametrize("kind", TOLERANCE, ids=lambda kind: kind.__name__)
def test_gradient(case: Case, kind: Any):
    check_case(case, kind)


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["dims", "rank"])
@pytest.mark.parametrize("case", [c for c in LOWERED if c.grad not in POOLINGS], ids=str)
def test_gradient_of_unknown_shapes(case: Case, how: str):
    check_case(case, np.float32, how)


@trains
@pytest.mark.parametrize("case", [c for c in LOWERED if c.ort is None], ids=str)
def test_gradient_is_that_of_the_kernel(case: Case):
    built = build(case)
    model, feeds = built.gradient(np.float32), typed(built.feeds, np.float32)
    check_lowered(model, feeds, run_onnxruntime(model, feeds), 1e-5)


RANDOM = {"BiasDropout", "BitmaskBiasDropout", "BitmaskDropout"}  # each runtime draws other numbers


def check_step(step: Step, expected: Callable[..., Mapping[str, Any]], tolerance: float) -> None:
    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return np.array(value, np.float32 if value.dtype == np.float64 else value.dtype)

    feeds = {name: convert(value) for name, value in step.feeds.items() if value is not None}
    model = step_model(step, feeds)
    untouched = {name: convert(value) for name, value in feeds.items()}
    check_lowered(model, untouched, expected(model, feeds), tolerance, (on_numpy,) if step.op in RANDOM else BOTH)


STEPS_LOWERED = [step for step in [*STEPS, *(step for step, _ in BY_HAND)] if step.op not in NOT_LOWERED]


@pytest.mark.parametrize("step", STEPS_LOWERED, ids=str)
def test_step(step: Step):
    check_step(step, on_numpy, 1e-6)


@trains
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_step_is_that_of_the_kernel(step: Step):
    check_step(step, run_onnxruntime, 1e-5)


def check_network(op: str, sizes: Any, left_out: tuple[str, ...], attrs: dict[str, Any]) -> None:
    feeds = recurrent.without(recurrent.arrays(op, *sizes, seed=3, **attrs), *left_out)
    if "P" in feeds:
        feeds["P"][:] = 0
    feeds = recurrent.without(recurrent.with_cotangents(op, feeds, attrs), *left_out)
    wide = {name: value if value.dtype == np.int32 else value.astype(np.float64) for name, value in feeds.items()}
    model = recurrent.gradient(op, wide, attrs)
    check_lowered(model, wide, on_numpy(model, wide), 1e-12, (on_numpy,))
    model = recurrent.gradient(op, feeds, attrs)
    # The Sigmoid inside ONNX Runtime's LSTM is off by 1e-6, and with clip its state is that of another operator.
    other = op == "LSTM" and "clip" in attrs
    check_lowered(model, feeds, on_numpy(model, feeds), 1e-5, (on_numpy,) if other else BOTH)


@pytest.mark.parametrize(("op", "sizes", "left_out", "attrs"), recurrent.GRADIENTS, ids=recurrent.name_of)
def test_network(op: str, sizes: Any, left_out: tuple[str, ...], attrs: dict[str, Any]):
    check_network(op, sizes, left_out, attrs)


@trains
@pytest.mark.parametrize(("op", "sizes", "left_out", "attrs"), recurrent.FORWARD_ONLY, ids=recurrent.name_of)
def test_network_is_that_of_the_kernel(op: str, sizes: Any, left_out: tuple[str, ...], attrs: dict[str, Any]):
    feeds = recurrent.arrays(op, *sizes, seed=3, **attrs)
    feeds = recurrent.with_cotangents(op, recurrent.supported(recurrent.without(feeds, *left_out)), attrs)
    feeds = recurrent.without(feeds, *left_out)
    model = recurrent.gradient(op, feeds, attrs)
    check_lowered(model, feeds, run_onnxruntime(model, feeds), 1e-5)


# Whole models


def parse(text: str, opset: int = 17) -> onnx.ModelProto:
    head = f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1, "other": 1]>'
    return onnx.parser.parse_model(f"{head} {text}")


REFERENCE = """
BatchNormalizationGrad, BiasGeluGrad_dX, BroadcastGradientArgs, ConcatTraining, ConvGrad, ConvTransposeGrad, DivGrad,
DropoutGrad, FakeQuantGrad, FastGeluGrad,
FusedMatMul, GRUGrad, GatherElementsGrad, GatherGrad, GatherNDGrad, GeluGrad,
LSTMGrad, LayerNormalizationGrad, LeakyReluGrad, LogSoftmaxGrad, LogSoftmaxGrad_13, PadAndUnflatten, QuickGeluGrad, ReluGrad,
ResizeGrad, Scale, SigmoidGrad, SimplifiedLayerNormalizationGrad, SliceGrad, SoftmaxCrossEntropyLossGrad,
SoftmaxCrossEntropyLossInternalGrad, SoftmaxGrad, SoftmaxGrad_13, SplitTraining, TanhGrad, ZeroGradient, BatchNormInternal,
GRUTraining, LSTMTraining, SimplifiedLayerNormalization, SoftmaxCrossEntropyLossInternal, ScaledSum, ShrunkenGather,
FlattenAndUnpad, FakeQuant, BiasGelu, FastGelu, QuickGelu, SGDOptimizerV2, AdamWOptimizer, InPlaceAccumulatorV2,
InplaceClipGradNorm, ReduceAllL2, PassThrough, Group"""


def test_every_operator_of_the_builder_is_lowered():
    known = {op_type for domain, op_type in (*FORMS, *DEFINITIONS) if domain == MICROSOFT}
    assert not set(re.findall(r"\w+", REFERENCE)) - known
    assert {("", "MaxPoolGrad"), ("", "AveragePoolGrad")} <= FORMS.keys()


def first_cases() -> list[Model]:
    """The first three cases of every operator with static and with symbolic shapes, where it has a derivative."""
    found: dict[Any, list[Model]] = {}
    for case in (case for case in every_case() if case.values == "smooth" and "-unknown-" not in case.name):
        found.setdefault((case.operator, case.static), []).append(case)
    return [case for cases in found.values() for case in cases[:3]]


@pytest.mark.matrix
@pytest.mark.parametrize("case", first_cases(), ids=str)
def test_gradient_in_the_dialect_of_onnx_runtime(case: Model):
    """What dialect "ort" writes, and what it becomes, both in double."""
    gradient = refgrad.gradient(case.model, case.wrt, case.outputs, dialect="ort")
    nodes = [node for graph in graphs(gradient.graph) for node in graph.node]
    foreign = {node.domain for node in nodes} - {"", "ai.onnx.ml"}
    plain = not foreign and not {node.op_type for node in nodes} & POOLINGS
    outputs = on_numpy(case.model, case.feeds)
    rng = np.random.default_rng(0)
    feeds = dict(case.feeds)
    for name, cotangent in json.loads(metadata(gradient)["refgrad.cotangents"]).items():
        feeds[cotangent] = np.asarray(rng.standard_normal(outputs[name].shape), outputs[name].dtype)
    lowered = refgrad.lower(gradient)
    if plain:
        assert lowered == gradient
        return
    assert {o.domain for o in lowered.opset_import} | {n.domain for n in lowered.graph.node} <= {"", "ai.onnx.ml"}
    expected, actual = in_double(gradient, feeds), in_double(lowered, feeds)
    for name, value in expected.items():
        check_equal(actual[name], value, 1e-11)


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def in_double(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    wide = {v.name: feeds[v.name] for v in model.graph.input if v.name in feeds}
    wide = {name: np.asarray(x, np.float64) if is_float(x) else x for name, x in wide.items()}
    return NUMPY.prepare(model, precision="float64").run(wide)


BUILT_WRONG = {"Where", "GlobalAveragePool"}  # it forgets to sum over broadcast axes; it divides by the size of nothing


@trains
@pytest.mark.parametrize("builder", ["raw", "module"])
def test_what_the_builders_of_onnx_runtime_write(builder: str):
    """The one is compared with what it wrote, on the interpreter; the other, which a YieldOp cuts in two, with our gradient."""
    done = set()
    with Builders(20) as builders:
        for case in first_cases():
            subject = case.model.graph.node[-1]
            if not case.static or subject.op_type in BUILT_WRONG:
                continue
            if case.operator.startswith(MICROSOFT) and subject.domain != MICROSOFT:
                continue  # a quantized operator, whose result is read behind it: the builders know no gradient of it
            if (subject.domain, subject.op_type) == (MICROSOFT, "Pad"):
                continue  # it gives the Pad of ai.onnx these pads, of shape (1, 2·rank), which the specification does not have
            report = refgrad.preflight(case.model, case.wrt, case.outputs)
            output, weights = report.outputs[0], {t.name for t in case.model.graph.initializer}
            wrt = [name for name in report.wrt if report.ok and name in depends_on(case.model, output)]
            if builder == "module" and any(not np.shape(x) for x in case.feeds.values()):
                continue  # it makes a vector of a scalar
            if builder == "module" and case.name == "BiasGelu-4,4-static-opset1":
                continue  # it sums the gradient of a bias over its only axis as well
            if builder == "module" and "sequence_lens" in case.name:
                continue  # it leaves no gap for an input of a network that is left out, and so moves those after it
            try:
                if builder == "raw":
                    built = builders.raw(case.model, wrt, output)
                else:
                    trained = [name for name in wrt if name in weights]
                    built = builders.module(case.model, [name for name in wrt if name not in weights], trained)
            except BuilderError:
                continue
            before = built.SerializeToString()
            lowered = refgrad.lower(built)
            assert built.SerializeToString() == before
            assert {node.domain for node in lowered.graph.node} <= {"", "ai.onnx.ml"}
            feeds, outputs = dict(case.feeds), on_numpy(case.model, case.feeds)
            for name, value in outputs.items():
                feeds[f"{name}_grad"] = np.asarray(np.random.default_rng(0).standard_normal(value.shape), value.dtype)
            actual = in_double(lowered, feeds)
            by = built if builder == "raw" else refgrad.gradient(case.model, wrt)
            expected = in_double(by, feeds)
            for name in expected.keys() & actual.keys():
                check_equal(actual[name], expected[name], 1e-10 if builder == "raw" else 1e-6)
            assert expected.keys() & actual.keys()
            done.add(case.model.graph.node[-1].op_type)
    assert len(done) > 50


SQUASH = (
    "squash (float[N, 3] x, float[3] w) => (float[N, 3] y, float[N, 3] z) { h = Mul(x, w) y = Tanh(h) z = Sigmoid(h) }"
)


def test_yield_becomes_outputs_and_cotangents():
    model = parse(SQUASH)
    yields = refgrad.gradient(model, dialect="ort", cotangent="yield")
    assert "YieldOp" in {node.op_type for node in yields.graph.node}
    lowered = refgrad.lower(yields)
    assert is_plain(lowered)
    assert [v.name for v in lowered.graph.input] == ["x", "w", "y_grad", "z_grad"]
    assert [v.name for v in lowered.graph.output] == ["x_grad", "w_grad", "y", "z"]
    expected = refgrad.gradient(model, keep_outputs=True)
    assert [v.type for v in lowered.graph.input] == [v.type for v in expected.graph.input]
    assert [v.type for v in lowered.graph.output] == [v.type for v in expected.graph.output]
    feeds = {name: numbers(*shape).astype(np.float32) for name, shape in (("x", (2, 3)), ("w", (3,)))}
    feeds |= {name: feeds["x"] + k for k, name in enumerate(("y_grad", "z_grad"))}
    for run in BOTH:
        for name, value in run(expected, feeds).items():
            check_equal(run(lowered, feeds)[name], value, 1e-6)


YIELD = """yielding (float[N] x) => (float[N] x_grad, float[N] y) {{
    y = Tanh(x)  z = Abs(x)
    {made} = com.microsoft.YieldOp <{attributes}> ({read})
    x_grad = com.microsoft.TanhGrad(y_grad, y)
}}"""
FULL = "full_shape_outputs = [0]"


@pytest.mark.parametrize(
    ("made", "read", "attributes", "inputs", "outputs"),
    [
        ("y_grad", "y", FULL, ["x", "y_grad"], ["x_grad", "y"]),
        ("y_grad", "z, y", f"{FULL}, non_differentiable_outputs = [0]", ["x", "y_grad"], ["x_grad", "y", "z"]),
        ("y_grad, z_grad", "y, z", FULL, ["x", "y_grad", "z_grad"], ["x_grad", "y", "z"]),  # nobody reads z_grad
        ('y_grad, ""', "y, z", FULL, ["x", "y_grad"], ["x_grad", "y", "z"]),
    ],
)
def test_yield(made: str, read: str, attributes: str, inputs: list[str], outputs: list[str]):
    model = parse(YIELD.format(made=made, read=read, attributes=attributes))
    lowered = refgrad.lower(model)
    onnx.checker.check_model(lowered, full_check=True)
    assert [v.name for v in lowered.graph.input] == inputs
    assert [v.name for v in lowered.graph.output] == outputs
    feeds = {name: np.array([0.5, -1.0], np.float32) for name in inputs}
    for run in BOTH:
        np.testing.assert_allclose(run(lowered, feeds)["x_grad"], 0.5 * (1 - np.tanh(feeds["x"]) ** 2) * [1, -2], 1e-6)


@pytest.mark.parametrize("declared", [True, False])
def test_a_yield_of_what_an_operator_of_onnx_runtime_computes(declared: bool):
    model = parse(
        "network (float[S, N, 3] x) => (float[1, N, 4] h, float[1, N, 4] c) { y, h, c = LSTM <hidden_size = 4> (x, W, R) }"
    )
    for name, size in (("W", 3), ("R", 4)):
        model.graph.initializer.append(numpy_helper.from_array(numbers(1, 16, size).astype(np.float32), name))
    given, yielded = (refgrad.gradient(model, ["x"], dialect="ort", cotangent=kind) for kind in ("input", "yield"))
    assert {"h", "c"} <= {value.name for value in yielded.graph.value_info}
    if not declared:
        del yielded.graph.value_info[:]
    lowered = refgrad.lower(yielded)
    assert {v.type.tensor_type.elem_type for v in lowered.graph.input} == {TensorProto.FLOAT}
    feeds = {"x": numbers(2, 3, 3), "h_grad": numbers(1, 3, 4), "c_grad": numbers(1, 3, 4)}
    feeds = {name: value.astype(np.float32) for name, value in feeds.items()}
    for run in BOTH:
        np.testing.assert_allclose(run(lowered, feeds)["x_grad"], on_numpy(given, feeds)["x_grad"], 1e-5, 1e-6)


BRANCHES = """branches (bool c, float[N] dy, float[N] y) => (float[N] dx) {
    dx = If(c) <
        then_branch = yes () => (float[N] d) { e = com.microsoft.TanhGrad(dy, y)  d = com.microsoft.TanhGrad(e, y) },
        else_branch = no () => (float[N] d) { d = com.microsoft.ReluGrad(dy, y) }
    >
}"""


def test_subgraphs_are_lowered():
    model = parse(BRANCHES)
    dy, y = np.array([1.0, 2.0], np.float32), np.array([-0.5, 0.25], np.float32)
    for c in (True, False):
        feeds = {"c": np.array(c), "dy": dy, "y": y}
        check_lowered(model, feeds, on_numpy(model, feeds), 1e-6)


def test_functions_are_lowered():
    model = parse(
        """calls (float[N] dy, float[N] y) => (float[N] dx) { e = other.twice(dy, y)  dx = com.microsoft.ReluGrad(e, y) }
        <domain: "other", opset_import: ["": 17, "com.microsoft": 1]>
        twice (d, y) => (dx) { e = com.microsoft.TanhGrad(d, y)  dx = com.microsoft.TanhGrad(e, y) }"""
    )
    feeds = {"dy": np.array([1.0, 2.0], np.float32), "y": np.array([-0.5, 0.25], np.float32)}
    check_lowered(model, feeds, on_numpy(model, feeds), 1e-6)


@pytest.mark.parametrize("opset", [13, 16, 17, 18])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMax"])
def test_a_reduction_in_a_body_has_the_form_of_its_opset(op_type: str, opset: int):
    body = FunctionEmitter(opset, "own", "node")
    body.reduce(op_type, "x", [0])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", body.nodes[-1].outputs[0]))
    graph = helper.make_graph(written(body.nodes), "g", [x], [y])
    onnx.checker.check_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


def test_a_model_that_imports_no_operators_of_onnx():
    model = parse("only (float[N] dy, float[N] y) => (float[N] dx) { dx = com.microsoft.TanhGrad(dy, y) }")
    del model.opset_import[2], model.opset_import[0]
    assert [o.domain for o in model.opset_import] == ["com.microsoft"]
    feeds = {"dy": np.array([1.0, 2.0], np.float32), "y": np.array([-0.5, 0.25], np.float32)}
    check_lowered(model, feeds, {"dx": feeds["dy"] * (1 - feeds["y"] ** 2)}, 1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "forward (float[N, 4] x, float[4] b) => (float[N, 4] y) { y = com.microsoft.BiasGelu(x, b) }",
        "forward (float[N, 4] x, float[4] b) => (float[N, 4] y) { y = com.microsoft.FastGelu(x, b) }",
        "forward (float[N, 4] x) => (float[N, 4] y) { y = com.microsoft.QuickGelu <alpha = 1.3> (x) }",
        "forward (float[N, 4] x, float[4] b) => (float[N, 4] y) { y = com.microsoft.SimplifiedLayerNormalization(x, b) }",
        "forward (float[N, 4] x, float[4] b) => (float[N, 4] y) { y = SimplifiedLayerNormalization(x, b) }",
        "forward (float[N, 4] x) => (float[N, 4] y) { z = com.microsoft.Gelu(x)  y = com.microsoft.GeluGrad(x, z) }",
    ],
)
@pytest.mark.parametrize("opset", [13, 17, 20])
def test_forward_operators(text: str, opset: int):
    model = parse(text, opset)
    feeds = {"x": numbers(3, 4).astype(np.float32), "b": numbers(4).astype(np.float32)}
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    lowered = check_lowered(model, feeds, on_numpy(model, feeds), 2e-6)
    assert {o.version for o in lowered.opset_import} == {max(opset, 16)}


POOLED = """pooled (float[N, C, H, W] x, float[N, C, P, Q] dy) => (float[N, C, H, W] dx, float[N, C, H, W] da) {
    [max] y, i = MaxPool <kernel_shape = [2, 2], strides = [2, 1]> (x)
    [average] a = AveragePool <kernel_shape = [2, 2], strides = [2, 1]> (x)
    dx = MaxPoolGrad <kernel_shape = [2, 2], strides = [2, 1]> (dy, i)
    ["average_Grad/AveragePoolGrad_0"] da = AveragePoolGrad <kernel_shape = [2, 2], strides = [2, 1]> (dy)
}"""


def test_poolings_know_the_shape_by_the_forward_operator():
    model = parse(POOLED)
    x, dy = numbers(2, 3, 4, 5).astype(np.float32), numbers(2, 3, 2, 4).astype(np.float32)
    lowered = refgrad.lower(model)
    dx, da = np.zeros_like(x), np.zeros_like(x)
    for n, c, p, q in np.ndindex(dy.shape):
        window = x[n, c, 2 * p : 2 * p + 2, q : q + 2]
        at = np.unravel_index(window.argmax(), window.shape)
        dx[n, c, 2 * p + at[0], q + at[1]] += dy[n, c, p, q]
        da[n, c, 2 * p : 2 * p + 2, q : q + 2] += dy[n, c, p, q] / 4
    for run in BOTH:
        actual = run(lowered, {"x": x, "dy": dy})
        check_equal(actual["dx"], dx, 1e-6)
        check_equal(actual["da"], da, 1e-6)


def test_names_that_are_taken():
    model = parse(
        """taken (float[N] buffer, float[N] g, bool[1] new, float[N] other)
        => (bool[1] done, float[N] buffer_updated, float[N] "a_Grad/Add_0") {
            [a] done = com.microsoft.InPlaceAccumulatorV2(buffer, g, new)
            buffer_updated = Neg(other)  "a_Grad/Add_0" = Abs(other)
        }"""
    )
    lowered = refgrad.lower(model)
    assert [v.name for v in lowered.graph.output] == ["done", "buffer_updated", "a_Grad/Add_0", "buffer_updated_1"]
    one = np.ones(2, np.float32)
    feeds = {"buffer": one, "g": 2 * one, "new": np.array([False]), "other": 3 * one}
    for run in BOTH:
        made = run(lowered, feeds)
        np.testing.assert_array_equal(made["buffer_updated_1"], 3 * one)
        np.testing.assert_array_equal(made["buffer_updated"], -3 * one)


def test_what_is_written_into_an_input_is_an_output_once():
    """A name that the model reads or returns is kept; a value between is nobody's to write."""
    model = parse(
        """named (float[N] first, float[N] second, float[N] third, float[N] g)
        => (bool[1] a, bool[1] b, bool[1] c, bool[1] d, float[N] returned, float[N] twice) {
            a, unread = com.microsoft.InPlaceAccumulatorV2(first, g)
            b, returned = com.microsoft.InPlaceAccumulatorV2(second, g)
            c, sum = com.microsoft.InPlaceAccumulatorV2(third, g)
            twice = Add(sum, sum)
            between = Neg(g)
            d = com.microsoft.InPlaceAccumulatorV2(between, g)
        }"""
    )
    outputs = [v.name for v in refgrad.lower(model).graph.output]
    assert outputs == ["a", "b", "c", "d", "returned", "twice", "first_updated", "sum"]


@pytest.mark.parametrize("condition", [True, False])
def test_what_a_branch_writes_into_an_input_is_an_output(condition: bool):
    """The input itself is returned by a branch that does not write it."""
    model = parse(
        """chosen (float[N] first, float[N] second, float[N] g, bool c) => (bool[1] done) {
            done = If (c) <
                then_branch = left () => (bool[1] l) { l = com.microsoft.InPlaceAccumulatorV2(first, g) },
                else_branch = right () => (bool[1] r) {
                    q, kept = com.microsoft.InPlaceAccumulatorV2(second, g)
                    n = Neg(kept)  r, unread = com.microsoft.InPlaceAccumulatorV2(first, n)
                } >
        }"""
    )
    lowered = refgrad.lower(model)
    assert [value.name for value in lowered.graph.output] == ["done", "first_updated", "second_updated"]
    one = np.ones(2, np.float32)
    feeds = {"first": one, "second": 2 * one, "g": 3 * one, "c": np.array(condition)}
    for run in BOTH:
        made = run(lowered, feeds)
        np.testing.assert_array_equal(made["first_updated"], 4 * one if condition else -4 * one)
        np.testing.assert_array_equal(made["second_updated"], 2 * one if condition else 5 * one)


def test_a_loop_that_writes_into_an_input_is_refused():
    model = parse(
        """loops (float[N] first, float[N] g, int64 n) => (bool[1] done) <bool[1] no = {0}> {
            done = Loop (n, , no) < body = step (int64 i, bool c, bool[1] s) => (bool d, bool[1] t) {
                d = Identity(c)  [inside] t = com.microsoft.InPlaceAccumulatorV2(first, g)
            } >
        }"""
    )
    with pytest.raises(
        LoweringError, match=r"'inside' \(InPlaceAccumulatorV2\) writes into 'first', an input of the model"
    ):
        refgrad.lower(model)


@pytest.mark.parametrize("training", [0, 1])
def test_running_statistics_are_written(training: int):
    """In training ONNX Runtime moves the mean and the variance that it is given."""
    outputs = "y, m1, v1, m2, r2" if training else "y"
    model = parse(
        f"""moves (float[4, 2, 3] x, float[2] s, float[2] b, float[2] mean, float[2] var) => (float[4, 2, 3] y) {{
            {outputs} = com.microsoft.BatchNormInternal <momentum = 0.75, training_mode = {training}>
                (x, s, b, mean, var)
        }}"""
    )
    x, mean, var = numbers(4, 2, 3), np.array([0.5, -0.25]), np.array([2.0, 0.5])
    feeds = {"x": x, "s": np.array([1.0, 2.0]), "b": np.array([0.5, 0.0]), "mean": mean, "var": var}
    lowered = refgrad.lower(model)
    assert [v.name for v in lowered.graph.output][1:] == (["mean_updated", "var_updated"] if training else [])
    for run in BOTH:
        made = run(lowered, {name: value.astype(np.float32) for name, value in feeds.items()})
        for c in range(2 if training else 0):
            batch = x[:, c].ravel()
            square = sum((value - sum(batch) / 12) ** 2 for value in batch) / 12
            np.testing.assert_allclose(made["mean_updated"][c], 0.75 * mean[c] + 0.25 * sum(batch) / 12, rtol=1e-6)
            np.testing.assert_allclose(made["var_updated"][c], 0.75 * var[c] + 0.25 * square, rtol=1e-6)


def test_names_types_and_weights_are_kept():
    model = parse(
        """kept (float[N, 3] x, float[N, 3] dy) => (float[N, 3] dx, int64[2] s)
        <float[3] z = {1, 2, 3}, float[3] a = {4, 5, 6}> {
            y = Mul(x, z)  w = Add(y, a)  dx = com.microsoft.ReluGrad(dy, w)  s = Shape(x)
        }"""
    )
    model.metadata_props.add(key="author", value="nobody")
    model.producer_name, model.model_version, model.graph.doc_string = "maker", 7, "what it is"
    lowered = refgrad.lower(model)
    assert list(lowered.graph.input) == list(model.graph.input)
    assert list(lowered.graph.output) == list(model.graph.output)
    assert list(lowered.graph.initializer)[:2] == list(model.graph.initializer)
    assert metadata(lowered) == {"author": "nobody"}
    assert (lowered.producer_name, lowered.model_version, lowered.graph.doc_string) == ("maker", 7, "what it is")


def test_a_plain_model_is_copied():
    model = parse("plain (float[N] x) => (float[N] y) { y = Neg(x) }")
    lowered = refgrad.lower(model)
    assert lowered == model
    assert lowered is not model


def test_external_data_is_referenced(tmp_path: Path):
    model = parse(
        "large (float[N, 64] x, float[N, 64] dy) => (float[N, 64] dx) { y = Mul(x, w)  dx = com.microsoft.ReluGrad(dy, y) }"
    )
    weight = numpy_helper.from_array(numbers(64, 64)[0].astype(np.float32).repeat(16).reshape(16, 64)[0], "w")
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    lowered = refgrad.lower(tmp_path / "model.onnx")
    (kept,) = [t for t in lowered.graph.initializer if t.name == "w"]
    assert kept.data_location == TensorProto.EXTERNAL
    assert not kept.raw_data
    (tmp_path / "weights").unlink()
    with pytest.raises(InvalidModelError, match="no file"):
        refgrad.lower(tmp_path / "model.onnx")


# Errors

ERRORS = [
    ("QuantizeBFP(x)", r"Node 'n' \(com.microsoft.QuantizeBFP\) has no form in ai.onnx operators here.*'ReluGrad'"),
    ("ReluGrad(x)", "Node 'n' is not a valid ReluGrad of ONNX Runtime: the node has 1 inputs; the inputs are dY, Y"),
    ("ReluGrad(x, x, x)", "the node has 3 inputs; the inputs are dY, Y"),
    ('ReluGrad(x, "")', "it lacks the input Y; the inputs are dY, Y"),
    ("ReluGrad <alpha = 1.0> (x, x)", "its attribute alpha is not known; the attributes are none"),
    ("BatchScale <scale_0 = 1.0> (x)", "it lacks the attribute scale_1; the attributes are scale_0, scale_1, scale_2"),
    ("MaxPoolGrad <kernel_shape = [2]> (x, i)", r"Node 'n' \(MaxPoolGrad\) cannot be lowered: the shape of its result"),
    ("AveragePoolGrad <kernel_shape = [2]> (x)", "the shape of its result is not known; add it to value_info"),
    ('InplaceClipGradNorm <norm_type = "max"> (s)', "norm_type='max' is not known; there is 'fro'"),
    ("FastGelu <beta = 1.0> (x)", r"Node 'n' \(FastGelu\) cannot be lowered: its attribute beta is not known"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_errors(call: str, message: str):
    model = parse(
        f"""wrong (float[A, B, C] x, int64[A, B, C] i, seq(float[N]) s) => (float[A, B, D] y) {{
            [n] y = com.microsoft.{call}
        }}"""
    )
    with pytest.raises(LoweringError, match=message) as caught:
        refgrad.lower(model)
    assert caught.value.node == "n"


def test_another_domain_is_an_error():
    model = parse("foreign (float[N] x) => (float[N] y) { [n] y = other.Unheard(x) }")
    with pytest.raises(
        LoweringError, match=r"Node 'n' \(other.Unheard\) has no form in ai.onnx operators here"
    ) as caught:
        refgrad.lower(model)
    assert caught.value.node == "n"


def test_a_yield_of_too_many_cotangents_is_an_error():
    model = parse(YIELD.format(made="y_grad, z_grad", read="y, z", attributes="non_differentiable_outputs = [1]"))
    with pytest.raises(LoweringError, match="has 2 outputs for 1 differentiable inputs"):
        refgrad.lower(model)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (onnx.ModelProto(), "The model is empty"),
        (b"model", "A model is a ModelProto or a path, not bytes"),
        ("nowhere.onnx", "There is no file"),
    ],
)
def test_what_is_no_model(model: Any, message: str):
    with pytest.raises(InvalidModelError, match=message):
        refgrad.lower(model)


# Wrong forms are caught


@pytest.mark.parametrize(
    ("op_type", "wrong"),
    [
        ("ReluGrad", lambda op, dY, Y: op.Where(op.Less(Y, 0.0), dY, 0.0)),
        ("TanhGrad", lambda op, dY, Y: op.Mul(dY, op.Sub(1.001, op.Mul(Y, Y)))),
        ("LeakyReluGrad", lambda op, dY, Y, *, alpha=0.01: op.Where(op.Greater(Y, 0.0), dY, op.Mul(dY, 0.01))),
        ("SoftmaxGrad", lambda op, dY, Y, *, axis=1: op.grad.SoftmaxGrad(dY, Y, axis=axis)),
        ("GatherGrad", lambda op, shape, indices, dY, *, axis=0: op.zeros_like(dY)),
    ],
)
def test_a_wrong_form_is_caught(monkeypatch: pytest.MonkeyPatch, op_type: str, wrong: Callable[..., Any]):
    monkeypatch.setitem(FORMS, (MICROSOFT, op_type), FORMS[MICROSOFT, op_type])
    form(op_type, results=FORMS[MICROSOFT, op_type].results, replace=True)(wrong)
    caught = 0
    for case in (case for case in LOWERED if case.grad == op_type):
        try:
            check_case(case, np.float32)
        except (AssertionError, BackendError):
            caught += 1
    assert caught


def test_batch_normalization_in_training_of_an_input_of_unknown_rank():
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[?] flat, int64[?] dims, float[C] s, float[C] b, float[C] m, float[C] v)
        => (float[C] saved_mean, float[C] saved_inv_std, float[?] row) <int64[1] one_row = {-1}>
        {
            x = Reshape<allowzero = 1>(flat, dims)
            y, running_mean, running_var, saved_mean, saved_inv_std = com.microsoft.BatchNormInternal(x, s, b, m, v)
            row = Reshape(y, one_row)
        }"""
    )
    rng = np.random.default_rng(0)
    for shape in ((5, 3), (2, 3, 4), (2, 3, 4, 5)):
        x, (s, b, m, v) = rng.standard_normal(shape), rng.uniform(0.5, 1.5, (4, 3))
        feeds = {"flat": x.reshape(-1), "s": s, "b": b, "m": m, "v": v}
        given = {n: a.astype(np.float32) for n, a in feeds.items()} | {"dims": np.array(shape)}
        check_lowered(model, given, on_numpy(model, given), 1e-5)


def test_a_pooling_within_a_body() -> None:
    """Its gradient reads the sizes off the declaration of its result, which the body holds."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 16]>
        pool (float[1,2,3] x, float[N] steps) => (float[N,1,2,3] y) {
            y = Scan <num_scan_inputs = 1, body = step (float step) => (float[1,2,3] pooled) {
                scaled = Mul (x, step)
                pooled = AveragePool <auto_pad = "SAME_UPPER", kernel_shape = [2]> (scaled)
            }> (steps)
        }"""
    )
    x, steps = np.arange(6.0, dtype=np.float32).reshape(1, 2, 3), np.array([1, 2], np.float32)
    feeds = {"x": x, "steps": steps, "y_grad": np.arange(12.0, dtype=np.float32).reshape(2, 1, 2, 3)}
    plain, fused = (refgrad.gradient(model, dialect=dialect) for dialect in ("onnx", "ort"))
    body = next(a.g for node in fused.graph.node if node.op_type == "Scan" for a in node.attribute if a.name == "body")
    made = {name for node in body.node if node.op_type == "AveragePoolGrad" for name in node.output}
    assert made
    assert made <= {value.name for value in body.value_info}
    got, expected = (on_numpy(m, feeds) for m in (refgrad.lower(fused), plain))
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


@pytest.mark.parametrize("op_type", ["LinearClassifier", "SVMClassifier"])
def test_a_classifier_beside_an_operator_of_onnx_runtime_stays(op_type):
    """Its definition reads its own labels: written out, it would never end."""
    settings = "coefficients = [1.0, 2.0, 3.0, 4.0], classlabels_ints = [0, 1]"
    if op_type == "SVMClassifier":
        settings = (
            "coefficients = [1.0, -1.0], classlabels_ints = [0, 1], support_vectors = [1.0, 2.0, 3.0, 4.0], "
            'vectors_per_class = [1, 1], rho = [0.1], kernel_type = "LINEAR", kernel_params = [0.0, 0.0, 3.0]'
        )
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1, "com.microsoft": 1]>
        g (float[N, 2] x) => (float[N, 2] z) {{ h = com.microsoft.Gelu(x)  l, z = ai.onnx.ml.{op_type} <{settings}> (h) }}""")
    lowered = refgrad.lower(model)
    assert [node.op_type for node in lowered.graph.node if node.domain == "ai.onnx.ml"] == [op_type]
    assert all(node.domain != "com.microsoft" for node in lowered.graph.node)

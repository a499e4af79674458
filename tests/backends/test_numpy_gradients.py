"""The operators of ONNX Runtime's training: against float64 differences of the forward operator, and against its kernels.

A `Case` is a gradient operator with the forward one; a `Step` an operator of the training loop, which has none. Without the
training build of ONNX Runtime 1.19.2 the differences alone are run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from training_operators import (
    CASES,
    DOUBLE,
    FAULT,
    MICROSOFT,
    MODES,
    NO_KERNEL,
    NUMPY,
    REDUCTIONS,
    Case,
    average_pool,
    batch_norm,
    build,
    check_equal,
    conv,
    conv_transpose,
    dense_loss,
    div,
    gather,
    invertible,
    load,
    loss,
    max_pool,
    norm,
    resize,
    run_onnxruntime,
    slice_,
    softmax,
    trains,
    typed,
    unary,
)
from training_steps import BY_HAND, SEQUENCES, STEPS, Step, step_model

from refgrad.backends.numpy import registry
from refgrad.conformance.known.bugs import known_bugs
from refgrad.conformance.known.bugs.bug import TRAINING, VERSIONS, installed
from refgrad.errors import BackendError

pytestmark = pytest.mark.slow
# What has no kernel in float16 runs in float between two casts, but for these: there is none, or it ends the process.
NO_HALF = {"SliceGrad", "MaxPoolGrad", "AveragePoolGrad"}


def check_differences(case: Case) -> None:
    built = build(case)
    gradients = NUMPY.prepare(built.gradient(np.float32), precision="float64").run(built.feeds)
    moved = [name for name in built.primals if f"d{name}" in gradients]
    rng = np.random.default_rng(3)
    directions = {name: rng.standard_normal(built.primals[name].shape) for name in moved}
    step = 1e-6
    ahead = built.forward({k: built.primals[k] + step * directions[k] for k in moved})
    behind = built.forward({k: built.primals[k] - step * directions[k] for k in moved})
    expected = np.sum(built.d_output * (ahead - behind)) / (2 * step)
    for name in moved:
        assert gradients[f"d{name}"].shape == built.primals[name].shape
        assert gradients[f"d{name}"].dtype == np.float64
    terms = [gradients[f"d{name}"] * directions[name] for name in moved]
    size = sum(float(np.abs(term).sum()) for term in terms)
    assert abs(sum(float(term.sum()) for term in terms) - expected) <= 1e-7 * size + 1e-8


def check_onnxruntime(case: Case, kind: Any = np.float32, tolerance: float = 1e-5) -> None:
    built = build(case)
    model, feeds = built.gradient(kind), typed(built.feeds, kind)
    expected = run_onnxruntime(model, feeds)
    actual = NUMPY.prepare(model).run(feeds)
    assert actual.keys() == expected.keys()
    for name in expected:
        check_equal(actual[name], expected[name], tolerance)


def check_missing(case: Case, kind: Any = np.float32) -> None:
    built = build(case)
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        run_onnxruntime(built.gradient(kind), typed(built.feeds, kind))


COMPARED = [case for case in CASES if case.ort is None]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_is_the_derivative(case: Case):
    check_differences(case)


@trains
@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_gradient_is_that_of_onnx_runtime(case: Case):
    check_onnxruntime(case)


@trains
@pytest.mark.parametrize("case", [c for c in COMPARED if c.grad not in NO_HALF], ids=str)
def test_half_gradient_is_that_of_onnx_runtime(case: Case):
    check_onnxruntime(case, np.float16, 2e-3)


@trains
@pytest.mark.parametrize("case", [c for c in COMPARED if c.grad in DOUBLE], ids=str)
def test_double_gradient_is_that_of_onnx_runtime(case: Case):
    check_onnxruntime(case, np.float64, DOUBLE[case.grad])


@trains
def test_what_has_no_kernel_has_none():
    for case in CASES:
        if case.ort == NO_KERNEL:
            check_missing(case)
    for grad, case in {case.grad: case for case in COMPARED}.items():
        if grad not in DOUBLE:
            check_missing(case, np.float64)
    check_missing(slice_((3, 5), starts=[0], ends=[2]), np.float16)


def test_what_is_not_compared_is_a_finding():
    shown = {bug.operator for bug in known_bugs() if bug.system == TRAINING}
    assert {case.grad for case in CASES if case.ort == FAULT} <= shown


def check_step(step: Step, kind: Any, tolerance: float) -> None:
    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return np.array(value, kind if value.dtype == np.float64 else value.dtype)

    feeds = {name: convert(value) for name, value in step.feeds.items() if value is not None}
    model = step_model(step, feeds)
    actual = NUMPY.prepare(model).run(feeds)
    expected = run_onnxruntime(model, feeds)  # it may write into the feeds
    assert actual.keys() == expected.keys()
    for name in expected:
        check_equal(actual[name], expected[name], tolerance)


@trains
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_step_is_that_of_onnx_runtime(step: Step):
    check_step(step, np.float32, 1e-5)


@trains
@pytest.mark.parametrize("step", [s for s in STEPS if s.double], ids=str)
def test_double_step_is_that_of_onnx_runtime(step: Step):
    check_step(step, np.float64, 1e-7 if step.attrs.get("scale_down") else 1e-14)  # 1/scale is in float


# Every operator of training that the wheel has is in one of the tables.

WORDS = (
    "Grad|Training|Optimizer|Accumulator|CrossEntropy|LogLikelihood|Dropout|FlattenAndUnpad|PadAndUnflatten|FakeQuant"
    "|ShrunkenGather|ReduceAllL2|BatchScale|ScaledSum|MixedPrecisionScale|BatchNormInternal|IsFinite|IsAllFinite"
)
SHORT = ("All", "Group", "PassThrough", "Scale", "View")  # names that a compiler keeps out of the strings of a program
ELSEWHERE = {
    "LSTMGrad",  # test_numpy_recurrent
    "LSTMTraining",
    "GRUGrad",
    "GRUTraining",
    "PythonOpGrad",  # it calls Python
}
UNCOMPARED = {
    # there is no CPU kernel
    "BatchScale",
    "BiasDropout",
    "BiasSoftmaxDropout",
    "BitmaskBiasDropout",
    "BitmaskDropout",
    "FlattenAndUnpad",
    "IsAllFinite",
    "IsFinite",
    "LambOptimizer",
    "MixedPrecisionScale",
    "ScaledSum",
    "All",
    "View",
    # findings show that they are wrong or fail
    "Group",
    "NegativeLogLikelihoodLossInternal",
    "PassThrough",
}


def mentioned(path: Path) -> set[str]:
    """The names in a program that could be those of training operators: strings, and classes as a compiler writes them."""
    data = path.read_bytes()
    names = {match.decode() for match in re.findall(rb"[A-Z][A-Za-z0-9]{3,60}(?:_(?:13|dX))?", data)}
    for match in re.finditer(rb"(\d{1,2})([A-Z][A-Za-z0-9_]{3,60})", data):
        names.add(match[2][: int(match[1])].decode())
    return {name for name in names if re.search(WORDS, name)} | set(SHORT)


def is_registered(op: str, domain: str) -> bool:
    """True if ONNX Runtime has a schema: without one it says so, with one it says what is wrong with the node."""
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    node = helper.make_node(op, ["x"], ["y"], domain=domain)
    graph = helper.make_graph([node], "g", [value], [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    try:
        load(model)
    except Exception as error:
        return not re.search("is not a registered function/op|No Op registered", str(error))
    return True


@trains
def test_every_operator_of_training_is_in_a_table():
    import onnxruntime

    (program,) = Path(onnxruntime.__file__).parent.glob("capi/onnxruntime_pybind11_state*")
    compared = {case.grad for case in CASES} | {step.op for step in STEPS}
    known = compared | ELSEWHERE | UNCOMPARED
    onnx_has = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    found = {
        name
        for name in mentioned(program)
        for domain in ("", MICROSOFT)
        if (domain or name not in onnx_has) and is_registered(name, domain)
    }
    assert "ReluGrad" in found
    assert len(found) > 60
    assert not found - known
    assert all(is_registered(name, MICROSOFT) or is_registered(name, "") for name in known)


def test_every_operator_of_training_has_a_kernel():
    for name in {case.grad for case in CASES} | {step.op for step in STEPS} | UNCOMPARED:
        assert registry.find(MICROSOFT, name, 1) or registry.find("", name, 17), name


# What hypothesis draws. `draw` makes a case; where ONNX Runtime is known to be wrong the case says so.

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def check(case: Case) -> None:
    check_differences(case)
    if case.ort is None and installed().get(TRAINING) == VERSIONS[TRAINING]:
        check_onnxruntime(case)


def dims(least: int = 0, most: int = 4, low: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(low, 4), min_size=least, max_size=most).map(tuple)


@few
@given(st.data())
def test_elementwise(data: st.DataObject):
    op, grad, reads, domain = data.draw(
        st.sampled_from(
            [
                ("Relu", "ReluGrad", "Y", ""),
                ("Sigmoid", "SigmoidGrad", "Y", ""),
                ("Tanh", "TanhGrad", "Y", ""),
                ("Gelu", "GeluGrad", "X", ""),
                ("FastGelu", "FastGeluGrad", "X", MICROSOFT),
                ("QuickGelu", "QuickGeluGrad", "X", MICROSOFT),
            ]
        )
    )
    check(unary(op, grad, reads, data.draw(dims(low=0)), domain))


@few
@given(st.data())
def test_softmax(data: st.DataObject):
    shape = data.draw(dims(1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    check(softmax(data.draw(st.sampled_from(["Softmax", "LogSoftmax"])), data.draw(st.booleans()), shape, axis))


@few
@given(st.data())
def test_broadcast_quotients(data: st.DataObject):
    shape = data.draw(dims())
    pair = []
    for _ in range(2):
        kept = shape[data.draw(st.integers(0, len(shape))) :]
        pair.append(tuple(n if data.draw(st.booleans()) else 1 for n in kept))
    check(div(*pair))


@few
@given(st.data())
def test_gathers(data: st.DataObject):
    op = data.draw(st.sampled_from(["Gather", "GatherElements", "GatherND"]))
    shape = data.draw(dims(1))
    rank = len(shape)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if op == "GatherND":
        batch = data.draw(st.integers(0, rank - 1))
        depth = data.draw(st.integers(1, rank - batch))
        where = (*shape[:batch], *data.draw(dims(0, 2)))
        if not where:
            where = (1,)
        limits = shape[batch : batch + depth]
        check(gather(op, shape, np.stack([rng.integers(-n, n, where) for n in limits], -1), batch_dims=batch))
        return
    axis = data.draw(st.integers(-rank, rank - 1))
    n = shape[axis]
    if op == "Gather":
        where = data.draw(dims(0, 3))
    else:
        where = tuple(data.draw(st.integers(1, 6 if i == axis % rank else m)) for i, m in enumerate(shape))
    check(gather(op, shape, rng.integers(-n, n, where), axis=axis))


@few
@given(st.data())
def test_slices(data: st.DataObject):
    shape = data.draw(dims(1))
    rank = len(shape)
    axes = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    bound = st.integers(-6, 6)
    starts, ends = ([data.draw(bound) for _ in axes] for _ in range(2))
    steps = [data.draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in axes]
    turned = any(step < 0 and axis == rank - 1 for step, axis in zip(steps, axes, strict=True))
    negative = [axis - rank if data.draw(st.booleans()) else axis for axis in axes]
    check(slice_(shape, FAULT if turned else None, starts=starts, ends=ends, axes=negative, steps=steps))


@few
@given(st.data())
def test_convolutions(data: st.DataObject):
    rank, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    kernel, strides, dilations = ([data.draw(st.integers(1, most)) for _ in range(rank)] for most in (3, 3, 2))
    pads = [data.draw(st.integers(0, 2)) for _ in range(2 * rank)]
    size = [(k - 1) * d + data.draw(st.integers(1, 4)) for k, d in zip(kernel, dilations, strict=True)]
    c, m = group * data.draw(st.integers(1, 2)), group * data.draw(st.integers(1, 2))
    n, window = data.draw(st.integers(1, 2)), {"strides": strides, "dilations": dilations, "pads": pads}
    check(conv((n, c, *size), (m, c // group, *kernel), group=group, **window))
    check(conv_transpose((n, c, *size), (c, m // group, *kernel), group=group, **window | {"pads": [0] * 2 * rank}))


@few
@given(st.data())
def test_poolings(data: st.DataObject):
    rank = data.draw(st.integers(1, 3))
    kernel, strides = ([data.draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(2))
    dilations = [data.draw(st.integers(1, 2)) for _ in range(rank)]
    pads = [data.draw(st.integers(0, k - 1)) for k in kernel * 2]
    size = [(k - 1) * d + data.draw(st.integers(1, 4)) for k, d in zip(kernel, dilations, strict=True)]
    n, c, ceil = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
    window: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": ceil}
    check(max_pool((n, c, *size), dilations=dilations, **window))
    included = data.draw(st.integers(0, 1))
    ort = FAULT if (ceil and included) or rank == 3 or max(dilations) > 1 else None
    check(average_pool((n, c, *size), ort, dilations=dilations, count_include_pad=included, **window))


@few
@given(st.data())
def test_normalizations(data: st.DataObject):
    shape = data.draw(dims(1))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    scale, options = shape[axis:], {"axis": axis, "epsilon": 1.0}
    ort = FAULT if np.prod(scale) == 1 else None
    check(norm("LayerNormalization", shape, scale, ort, **options))
    check(norm("SimplifiedLayerNormalization", shape, scale, ort, **options))
    check(invertible(shape, scale, ort, **options))
    if len(shape) > 1:
        check(batch_norm(*shape, epsilon=1.0))


@few
@given(st.data())
def test_losses(data: st.DataObject):
    n, c, rest = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(dims(0, 2))
    weights, internal = data.draw(st.booleans()), data.draw(st.booleans())
    attrs: dict[str, Any] = {"reduction": data.draw(st.sampled_from(REDUCTIONS))}
    check(dense_loss(n, *rest, c, reduction=attrs["reduction"], ort=FAULT if attrs["reduction"] == "none" else None))
    if data.draw(st.booleans()):
        attrs["ignore_index"] = data.draw(st.sampled_from([-1, -100, c, c - 1] if c > 1 else [-1, -100]))
    case = loss((n, c, *rest), weights, internal, **attrs)
    if "ignore_index" in attrs and (case.other["labels"] == attrs["ignore_index"]).all():
        return  # the mean of nothing is not differentiable
    check(case)


@few
@given(st.data())
def test_resizes(data: st.DataObject):
    shape = data.draw(dims(1, 3, 2))
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    attrs: dict[str, Any] = {
        "axes": axes,
        "mode": data.draw(st.sampled_from(["nearest", "linear", "cubic"])),
        "coordinate_transformation_mode": data.draw(st.sampled_from(MODES)),
        "exclude_outside": data.draw(st.integers(0, 1)),
        "antialias": data.draw(st.integers(0, 1)),
    }
    if data.draw(st.booleans()):
        check(resize(shape, [data.draw(st.sampled_from([0.5, 0.75, 1, 1.3, 2.5])) for _ in axes], **attrs))
    else:
        check(resize(shape, None, [data.draw(st.integers(1, 7)) for _ in axes], **attrs))


def test_the_scale_of_a_resize_has_to_follow():
    case = resize((3, 4), None, [7, 9], mode="linear")
    case.attrs["keep_aspect_ratio_policy"] = "not_smaller"
    built = build(case)
    with pytest.raises(BackendError, match=r"no one scale makes the sizes \[3, 4\] become \[7, 9\]"):
        NUMPY.prepare(built.gradient(np.float32)).run(typed(built.feeds, np.float32))


@pytest.mark.parametrize(("step", "expected"), BY_HAND, ids=lambda value: str(value) if isinstance(value, Step) else "")
def test_result_by_hand(step: Step, expected: dict[str, Any]):
    feeds = {name: value for name, value in step.feeds.items() if value is not None}
    actual = NUMPY.prepare(step_model(step, feeds)).run(feeds)
    for name, value in expected.items():
        check_equal(actual[name], value, 1e-7)


@pytest.mark.parametrize(
    ("case", "narrow", "wide"),
    [
        (norm("LayerNormalization", (2, 3), (3,)), ("X",), ("d_Y", "S", "mean", "r")),
        (norm("LayerNormalization", (2, 3), (3,)), ("d_Y", "S"), ("X", "mean", "r")),
        (norm("SimplifiedLayerNormalization", (2, 3), (3,)), ("X",), ("d_Y", "S", "r")),
        (batch_norm(2, 3, 2), ("d_Y", "X"), ("S", "saved_mean", "saved_r")),
        (batch_norm(2, 3, 2), ("S",), ("d_Y", "X", "saved_mean", "saved_r")),
    ],
    ids=str,
)
def test_each_gradient_has_the_type_of_its_tensor(case: Case, narrow: tuple[str, ...], wide: tuple[str, ...]):
    """The schemas let X, the scale and the statistics have different types."""
    built = build(case)
    kinds = {**dict.fromkeys(narrow, np.float16), **dict.fromkeys(wide, np.float32)}
    feeds = {name: value.astype(kinds[name]) for name, value in built.feeds.items()}
    model = built.gradient(np.float32)
    for value in model.graph.input:
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kinds[value.name]))
    for value in model.graph.output:
        kind = kinds["X" if value.name == "dX" else "S"]
        value.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    rough = NUMPY.prepare(model).run(feeds)
    exact = NUMPY.prepare(model, precision="float64").run(built.feeds)
    for name, value in rough.items():
        check_equal(value, exact[name].astype(kinds["X" if name == "dX" else "S"]), 4e-3)


def test_there_is_one_norm_to_clip_by():
    step = Step("InplaceClipGradNorm", {"G": SEQUENCES["W"]}, ("Y",), {"norm_type": "inf"})
    with pytest.raises(BackendError, match=r"norm_type 'inf' is not supported; there is 'fro'"):
        NUMPY.prepare(step_model(step, step.feeds)).run(step.feeds)

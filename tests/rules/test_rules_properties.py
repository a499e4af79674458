"""Properties of the elementwise rules, reductions and losses on random shapes, attributes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain

import numpy as np
import onnx
import pytest
from checking import assert_gradient, by_operator
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import BroadcastableShapes, mutually_broadcastable_shapes
from onnx import ModelProto, TensorProto
from onnx.defs import OpSchema

import refgrad
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases import activation, arithmetic, loss, reduction
from refgrad.conformance.cases.reduction import REDUCTIONS
from refgrad.tables.schemas import find_schema

pytestmark = pytest.mark.slow

TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
quick = settings(max_examples=25, derandomize=True, deadline=None)


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers between 0.5 and 1.5 of either sign, no two of them close."""
    rng = np.random.default_rng(seed)
    steps = rng.permutation(max(int(np.prod(shape)), 1))[: int(np.prod(shape))].reshape(shape)
    return ((0.5 + steps / max(steps.size, 1)) * rng.choice([-1, 1], shape)).astype(np.float32)


@quick
@given(
    st.sampled_from(["Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu"]),
    mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3, max_dims=4),
    st.sampled_from(SHAPES),
    st.integers(0, 9),
)
def test_broadcasting(op_type: str, pair: BroadcastableShapes, shapes: str, seed: int) -> None:
    left, right = pair.input_shapes
    if op_type == "PRelu":  # its slope does not broadcast the other input
        left = pair.result_shape
    assert_gradient(node_case(op_type, numbers(left, seed), 2 + numbers(right, seed + 1), shapes=shapes), runtime=False)


@quick
@given(st.data(), st.sampled_from(REDUCTIONS), st.sampled_from(SHAPES), st.booleans(), st.booleans())
def test_reductions(data: st.DataObject, op_type: str, shapes: str, keepdims: bool, constant: bool) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    signed = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in axes]
    case = node_case(
        op_type,
        np.abs(numbers(tuple(shape), len(axes))),
        np.array(signed, np.int64),
        keepdims=int(keepdims),
        noop_with_empty_axes=int(data.draw(st.booleans())),
        constant=["axes"] if constant else [],
        shapes=shapes,
    )
    assert_gradient(case, runtime=False)


@quick
@given(st.data(), st.sampled_from(["Softmax", "LogSoftmax"]), st.sampled_from(SHAPES))
def test_softmax(data: st.DataObject, op_type: str, shapes: str) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    for dialect in ("onnx", "ort"):
        assert_gradient(node_case(op_type, numbers(shape, 0), axis=axis, shapes=shapes), dialect, runtime=False)


@quick
@given(st.data(), st.sampled_from(["none", "sum", "mean"]), st.booleans(), st.sampled_from(SHAPES))
def test_losses(data: st.DataObject, reduction: str, weighted: bool, shapes: str) -> None:
    batch, classes = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    further = data.draw(st.lists(st.integers(1, 3), max_size=2))
    size = batch * int(np.prod(further))
    labels = data.draw(st.lists(st.integers(0, classes - 1), min_size=size, max_size=size))
    case = node_case(
        "SoftmaxCrossEntropyLoss",
        numbers((batch, classes, *further), size),
        np.array(labels, np.int64).reshape(batch, *further),
        np.abs(numbers((classes,), 1)) if weighted else None,
        reduction=reduction,
        outputs=data.draw(st.integers(1, 2)),
        shapes=shapes,
    )
    assert_gradient(case, data.draw(st.sampled_from(["onnx", "ort"])), tolerance=1e-5, runtime=False)


def one_case_per_operator() -> Iterator[Case]:
    """The first case of every operator, symbolic, whose float type can be changed."""
    seen = set()
    tables: tuple[Callable[[], Iterator[Case]], ...] = (
        arithmetic.cases,
        activation.cases,
        reduction.cases,
        loss.cases,
    )
    for case in chain.from_iterable(table() for table in tables):
        operator = case.operator
        if operator not in seen and "symbolic" in case.name and operator not in ("Cast", "CastLike"):
            seen.add(operator)
            yield case


@pytest.mark.matrix
@pytest.mark.parametrize("kind", TYPES, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("case", list(one_case_per_operator()), ids=str)
def test_types(case: Case, kind: int) -> None:
    """The gradient is of the type of the model: full_check infers every type anew."""
    model = retyped(case.model, kind)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        pytest.skip("the operator does not have this type")
    gradient = refgrad.gradient(model, wrt=case.wrt)
    onnx.checker.check_model(gradient, full_check=True)
    assert {value.type.tensor_type.elem_type for value in gradient.graph.output} == {kind}


@pytest.mark.matrix
@pytest.mark.parametrize("opset", [16, 18, onnx.defs.onnx_opset_version()])
@pytest.mark.parametrize("case", list(one_case_per_operator()), ids=str)
def test_opsets(case: Case, opset: int) -> None:
    """What is emitted exists in the opset of the model."""
    model = ModelProto()
    model.CopyFrom(case.model)
    model.opset_import[0].version = opset
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        pytest.skip("the operator looks different in this opset")
    onnx.checker.check_model(refgrad.gradient(model, wrt=case.wrt), full_check=True)


def retyped(model: ModelProto, kind: int) -> ModelProto:
    """The model with another type in place of float32."""
    changed = ModelProto()
    changed.CopyFrom(model)
    for value in (*changed.graph.input, *changed.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = kind
    return changed


@cache
def several(operator: str, opset: int) -> bool:
    """True if the schema of the operator has several outputs that can be floats."""
    domain, _, op_type = operator.rpartition(".")
    schema = find_schema(op_type, domain, opset)
    floats = {c.type_param_str for c in schema.type_constraints if "float" in " ".join(c.allowed_type_strs)}
    found = [formal for formal in schema.outputs if formal.type_str in floats or "float" in formal.type_str]
    return len(found) > 1 or any(formal.option == OpSchema.FormalParameterOption.Variadic for formal in found)


OF_ONE_OUTPUT = {  # operators whose cases have one float output at most
    ("", "SequenceMap"),
    ("com.microsoft", "RMSNormRotary"),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"),
}
OF_SEVERAL_OUTPUTS = by_operator(lambda case: several(case.operator, case.opset))


@pytest.mark.matrix
@pytest.mark.parametrize("key", sorted(OF_SEVERAL_OUTPUTS), ids=".".join)
def test_one_output_alone(key: tuple[str, str]) -> None:
    """The others have no cotangent, which is not the same as one of zeros: of a case with most outputs per kind of shapes."""
    found: dict[str, tuple[Case, list[str]]] = {}
    for case in OF_SEVERAL_OUTPUTS[key]:
        floats = [v.name for v in case.model.graph.output if v.type.tensor_type.elem_type == TensorProto.FLOAT]
        shapes = next((shapes for shapes in SHAPES if f"-{shapes}-" in case.name), "")
        full = all(array.size for array in case.feeds.values())
        if full and len(floats) > max(1, len(found.get(shapes, (case, []))[1])):
            found[shapes] = case, floats
    assert bool(found) != (key in OF_ONE_OUTPUT)
    for case, floats in found.values():
        for output in floats:
            assert_gradient(case.changed(outputs=(output,)), directions=1, runtime=False)

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checking import assert_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

import refgrad
from refgrad.conformance.case import SHAPES, Case, node_case
from refgrad.conformance.cases.shape import cases, ints, numbers
from refgrad.tables.dialects import DIALECTS

SEARCH = settings(max_examples=25, derandomize=True, deadline=None)
KINDS = [np.float16, ml_dtypes.bfloat16, np.float64]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect)


@st.composite
def slices(draw: st.DrawFn) -> Case:
    dims = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    axes = draw(st.lists(st.integers(0, len(dims) - 1), min_size=1, max_size=len(dims), unique=True))
    some = st.lists(st.integers(-7, 7), min_size=len(axes), max_size=len(axes))
    steps = draw(st.lists(st.sampled_from([-3, -2, -1, 1, 1, 2, 3]), min_size=len(axes), max_size=len(axes)))
    signed = [axis - draw(st.sampled_from([0, len(dims)])) for axis in axes]
    constant = draw(st.lists(st.sampled_from(["starts", "ends", "axes", "steps"]), unique=True))
    inputs = ints(*draw(some)), ints(*draw(some)), ints(*signed), ints(*steps)
    return _drawn(draw, "Slice", numbers(*dims), *inputs, constant=constant)


@st.composite
def paddings(draw: st.DrawFn) -> Case:
    mode = draw(st.sampled_from(["constant", "constant", "reflect", "edge", "wrap"]))
    dims = draw(st.lists(st.integers(0 if mode == "constant" else 1, 4), min_size=1, max_size=3))
    most = [{"constant": 3, "edge": 3, "wrap": n, "reflect": n - 1}[mode] for n in dims]
    least = [-(n // 2) if mode == "constant" else 0 for n in dims]
    pads = [draw(st.integers(low, high)) for low, high in zip(least * 2, most * 2, strict=True)]
    constant = draw(st.sampled_from([(), ("pads",)]))
    value = np.array(0.5, np.float32) if mode == "constant" else None
    return _drawn(draw, "Pad", numbers(*dims), ints(*pads), value, mode=mode, constant=constant)


@st.composite
def repetitions(draw: st.DrawFn) -> Case:
    dims = draw(st.lists(st.integers(0, 3), min_size=0, max_size=4))
    if draw(st.booleans()):
        repeats = [draw(st.integers(0, 3)) for _ in dims]
        constant = draw(st.sampled_from([(), ("repeats",)]))
        return _drawn(draw, "Tile", numbers(*dims), ints(*repeats), constant=constant)
    leading = draw(st.lists(st.integers(0, 3), max_size=2))
    to = leading + [draw(st.integers(0, 3)) if n == 1 else draw(st.sampled_from([1, n])) for n in dims]
    constant = draw(st.sampled_from([(), ("shape",)]))
    return _drawn(draw, "Expand", numbers(*dims), ints(*to), constant=constant)


@st.composite
def joints(draw: st.DrawFn) -> Case:
    dims = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    axis = draw(st.integers(-len(dims), len(dims) - 1))
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    if draw(st.booleans()):
        parts = [numbers(*dims[:axis], size, *dims[axis:][1:]) for size in sizes]
        return _drawn(draw, "Concat", *parts, axis=axis)
    whole = numbers(*dims[:axis], sum(sizes), *dims[axis:][1:])
    constant = draw(st.sampled_from([(), ("split",)]))
    return _drawn(draw, "Split", whole, ints(*sizes), axis=axis, outputs=len(sizes), constant=constant)


def _drawn(draw: st.DrawFn, op_type: str, *inputs: np.ndarray | None, **arguments: Any) -> Case:
    opset = draw(st.sampled_from([19, 21] if op_type == "Pad" else [16, 18, 21]))
    return node_case(op_type, *inputs, opset=opset, shapes=draw(st.sampled_from(SHAPES)), **arguments)


@SEARCH
@given(st.one_of(slices(), slices(), paddings(), repetitions(), joints()), st.sampled_from([*DIALECTS]))
def test_any_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    assert_gradient(case, dialect)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_every_float_type(shapes: str, kind: Any) -> None:
    x = numbers(2, 8).astype(kind)
    for op_type, inputs, options in (
        ("Slice", (x, ints(1), ints(7), ints(1), ints(2)), {"constant": ["starts", "ends", "axes", "steps"]}),
        ("Slice", (x, ints(1), ints(7), ints(1), ints(-2)), {}),
        ("Pad", (x, ints(1, -1, 0, 2), np.array(0.5, kind)), {}),
        ("Pad", (x, ints(1, 1, 0, 2)), {"mode": "reflect"}),
        ("Tile", (x, ints(2, 2)), {}),
        ("Expand", (x, ints(3, 1, 8)), {}),
        ("Concat", (x, x[:1]), {"axis": 0}),
        ("Split", (x, ints(3, 5)), {"axis": 1, "outputs": 2}),
        ("Trilu", (x,), {}),
    ):
        for dialect in DIALECTS:
            case = node_case(op_type, *inputs, opset=21, shapes=shapes, **options)
            assert_gradient(case, dialect, runtime=kind is not ml_dtypes.bfloat16)  # ONNX Runtime has no such Pad


def test_known_slices_and_pads_need_no_scatter() -> None:
    def operators(case: Case) -> list[str]:
        return [node.op_type for node in refgrad.gradient(case.model, wrt=case.wrt).graph.node]

    names = ["starts", "ends", "axes", "steps"]
    unit = node_case("Slice", numbers(5, 6), ints(1), ints(4), ints(0), constant=names[:3], opset=21)
    assert operators(unit) == ["Pad"]
    strided = node_case("Slice", numbers(5, 6), ints(1), ints(6), ints(1), ints(2), constant=names, opset=21)
    assert operators(strided) == ["Unsqueeze", "Pad", "Reshape", "Pad"]
    whole = node_case("Slice", numbers(5, 6), ints(0), ints(9), ints(1), constant=names[:3], opset=21)
    assert operators(whole) == ["Identity"]


def test_an_output_of_split_without_a_cotangent_counts_as_zero() -> None:
    case = node_case("Split", numbers(5, 3), ints(2, 3), outputs=2, constant=["split"], opset=21)
    for output in ("outputs_0", "outputs_1"):
        assert_gradient(Case(f"{case}-{output}", case.model, case.feeds, outputs=(output,)))

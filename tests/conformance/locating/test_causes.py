"""The usual causes of a wrong gradient are named: a factor, axes, another parameter's gradient, zeros."""

from __future__ import annotations

import io

import numpy as np
import onnx.parser
import pytest
from rich.console import Console

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.locating.causes import cause_of
from refgrad.conformance.locating.comparing import compare
from refgrad.conformance.reports.comparisons import show
from refgrad.errors import FeedError

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)
DUE = RNG.standard_normal((6, 6, 3, 3))
TURNED = RNG.standard_normal(DUE.shape)
OTHERS = {"w": DUE, "v": RNG.standard_normal(DUE.shape), "b": RNG.standard_normal(6), "u": TURNED}
SIZES = ((8, 7), (8, 3), (64, 5))


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (DUE / 8, "(1/8), as from a mean over 8"),
        (DUE / 56, "(1/56), as from a mean over 56"),
        (DUE * 7, "a sum over 7 instead of a mean or 7 steps"),
        (DUE * 4, "4 steps without zero_grad"),
        (DUE * 2, "2 steps without zero_grad"),
        (DUE * 65536, "as from a loss scale that is not undone"),
        (DUE / 65536, "(1/65536), as from a loss scale that is undone twice"),
        (DUE * 64, "as from a sum over 64 instead of a mean or a loss scale that is not"),
        (DUE / 64, "(1/64), as from a mean over 64 instead of a sum or a loss scale"),
        (DUE * 128, "as from a loss scale"),
        (DUE * -64, "it is -64 times the right one, as from a sum over 64"),
        (TURNED.swapaxes(0, 1) * 64, "of 'u', and its axes are in the order [1, 0, 2, 3], and it is 64 times"),
        (TURNED.swapaxes(0, 1), "it is the gradient of 'u', and its axes are in the order [1, 0, 2, 3]"),
        (DUE * 1.001, "it is 1.001 times the right one"),
        (-DUE, "the other sign"),
        (DUE.swapaxes(0, 1), "its axes are in the order [1, 0, 2, 3]"),
        (DUE.transpose(0, 2, 3, 1), "(channels last)"),
        (DUE.transpose(0, 2, 3, 1).reshape(DUE.shape), "its memory has the axes [0, 2, 3, 1] (channels last)"),
        (DUE[:, :, ::-1, ::-1], "in reverse along axis 2, 3"),
        (np.roll(DUE, 1, 3), "shifted by 1 along axis 3"),
        (np.concatenate([DUE[2:], DUE[:2]]), "3 parts in the order [1, 2, 0]"),
        (OTHERS["v"], "it is the gradient of 'v'"),
        (OTHERS["v"] / 8, "it is the gradient of 'v', and it is 0.125 times"),
        (0 * DUE, "it is all zeros"),
        (DUE * np.arange(1, 7).reshape(6, 1, 1, 1), "each row has a factor of its own, from 1 to 6"),
        (DUE + 1e-2 * OTHERS["v"], ""),
        (RNG.standard_normal(DUE.shape), ""),
        (np.full(DUE.shape, np.nan), ""),
    ],
)
def test_a_usual_change_is_named(got, expected):
    cause = cause_of(np.asarray(got, np.float32), DUE, "w", OTHERS, SIZES)
    assert expected in cause
    assert bool(cause) == bool(expected)


def test_zero_and_empty_gradients_have_no_cause():
    nothing = np.zeros((0, 3))
    assert cause_of(nothing, nothing, "w", {}, ()) == ""
    assert cause_of(np.ones(3), np.zeros(3), "w", {}, ()) == ""


NORMS = """
    <ir_version: 8, opset_import: ["": 18]>
    two (float[3, 6] x) => (float[3, 6] y) <float[6] one = {1, 1, 1, 1, 1, 1}, float[6] zero = {0, 0, 0, 0, 0, 0}>
    { h = LayerNormalization(x, one, zero)  t = Tanh(h)  y = LayerNormalization(t, one, zero) }
"""
APART = NORMS.replace("(t, one, zero)", "(t, one2, zero2)").replace(
    "<float[6] one", "<float[6] one2 = {1, 1, 1, 1, 1, 1}, float[6] zero2 = {0, 0, 0, 0, 0, 0}, float[6] one"
)


def recorded(with_values=True):
    """The gradients by the weights of both norms, which `NORMS` has merged."""
    model = onnx.parser.parse_model(APART)
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((3, 6)).astype(np.float32),
        "y_grad": rng.standard_normal((3, 6)).astype(np.float32),
    }
    names = {"one": "a.weight", "zero": "a.bias", "one2": "b.weight", "zero2": "b.bias"}
    gradients = get_backend("numpy").prepare(refgrad.gradient(model, ["x", *names])).run(feeds)
    found = {
        **feeds,
        "x_grad": gradients["x_grad"],
        **{f"{new}_grad": gradients[f"{old}_grad"] for old, new in names.items()},
    }
    if with_values:
        found |= {new: np.full(6, new.endswith("weight"), np.float32) for new in names.values()}
    return found


@pytest.mark.parametrize("with_values", [True, False])
@pytest.mark.parametrize("names", [("one", "zero"), ("a.weight", "a.bias")])
def test_gradients_of_merged_weights_are_added(with_values, names):
    model = onnx.parser.parse_model(NORMS)
    for tensor in model.graph.initializer:
        new = dict(zip(("one", "zero"), names, strict=True))[tensor.name]
        for node in model.graph.node:
            node.input[:] = [new if name == tensor.name else name for name in node.input]
        tensor.name = new
    recording = recorded(with_values)
    found = compare(model, "refgrad@numpy", recording)
    assert found.ok, [(tensor.name, tensor.verdict, tensor.b.reason) for tensor in found.tensors]
    assert not found.b.unmatched
    assert {tensor.name for tensor in found.tensors} == {"x", "a.weight + b.weight", "a.bias + b.bias"}


def test_zeros_are_not_taken_for_the_ones_minus_one():
    """Three norms, merged under names of their own: 0 + 1 = 1 explains nothing where ones are recorded."""
    model = onnx.parser.parse_model(NORMS)
    recording = recorded()
    for kind in ("weight", "bias"):
        half = recording[f"b.{kind}_grad"] / 2
        recording |= {f"b.{kind}_grad": half, f"c.{kind}_grad": half, f"c.{kind}": recording[f"b.{kind}"]}
    recording["c.weight_grad"], recording["b.weight_grad"] = (
        recording["c.weight_grad"] + 1, recording["b.weight_grad"] - 1
    )  # fmt: skip
    found = compare(model, "refgrad@numpy", recording)
    assert found.ok, [(tensor.name, tensor.how, tensor.verdict) for tensor in found.tensors]
    assert {tensor.name for tensor in found.tensors} == {
        "x",
        "a.weight and 2 more",
        "a.bias + b.bias + c.bias",
    } or found.ok


def test_too_many_gradients_for_a_sum_leave_it_undecided():
    model = onnx.parser.parse_model(NORMS)
    for tensor in model.graph.initializer:
        new = {"one": "a.weight", "zero": "a.bias"}[tensor.name]
        for node in model.graph.node:
            node.input[:] = [new if name == tensor.name else name for name in node.input]
        tensor.name = new
    recording = recorded(with_values=False)
    rng = np.random.default_rng(0)
    more = {f"n{k}.weight_grad": rng.standard_normal(6).astype(np.float32) for k in range(8)}
    found = compare(model, "refgrad@numpy", {**recording, **more})
    assert {tensor.b.verdict for tensor in found.tensors if tensor.name != "x"} == {"undecided"}


def test_a_cotangent_that_is_not_finite_is_refused():
    model, x, gradients = network()
    with pytest.raises(FeedError, match="The cotangent of 'y' is not finite"):
        compare(model, "refgrad@numpy", {"x": x, "y_grad": gradients["y"] * np.nan, "w_grad": gradients["w"]})


def test_names_of_the_model_are_no_marks_of_one_another():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[2] x, float[2] dx, float[2] gx) => (float[2] y) { h = Mul(x, dx)  y = Mul(h, gx) }
    """)
    x, dx, gx = np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])
    assert compare(model, "refgrad@numpy", {"x": x, "dx": dx, "gx": gx, "x_grad": dx * gx}).ok


def test_a_wrong_part_of_a_sum_is_wrong():
    model = onnx.parser.parse_model(NORMS)
    recording = recorded()
    recording["b.weight_grad"] = 1.1 * recording["b.weight_grad"]
    found = compare(model, "refgrad@numpy", recording)
    assert [tensor.name for tensor in found.tensors if not tensor.ok] == ["a.weight + b.weight"]


def network():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[2, 3] x) => (float[2, 3] y) <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 10}> { h = MatMul(x, w)  y = Tanh(h) }
    """)
    feeds = {"x": np.float32([[0.1, 0.2, -0.1], [0.05, -0.2, 0.1]]), "y_grad": np.float32([[1, -2, 0.5], [0.3, 1, -1]])}
    gradients = get_backend("numpy").prepare(refgrad.gradient(model, ["x", "w"])).run(feeds)
    return model, feeds["x"], {"y": feeds["y_grad"], "x": gradients["x_grad"], "w": gradients["w_grad"]}


@pytest.mark.parametrize("mark", ["d{}", "d_{}", "g:{}", "grad_{}", "grad/{}", "{}.grad", "{}_grad", "{}:grad"])
def test_the_usual_names_of_gradients_are_read(mark):
    model, x, gradients = network()
    found = compare(model, "refgrad@numpy", {"x": x, **{mark.format(name): value for name, value in gradients.items()}})
    assert found.ok
    assert {tensor.name for tensor in found.tensors} == {"x", "w"}
    wrong = {"x": x, **{mark.format(name): value * (1 + (name == "w")) for name, value in gradients.items()}}
    assert [tensor.name for tensor in compare(model, "refgrad@numpy", wrong).tensors if not tensor.ok] == ["w"]


def test_a_cause_of_several_tensors_is_said_once():
    model, x, gradients = network()
    found = compare(
        model,
        "refgrad@numpy",
        {"x": x, "y_grad": gradients["y"], "x_grad": gradients["x"] / 2, "w_grad": gradients["w"] / 2},
    )
    console = Console(width=200, record=True, file=io.StringIO())
    show(found, console)
    told = console.export_text()
    assert told.count("it is 0.5 times the right one") == 2  # once in the list, once in the sentence
    assert "x, w (b) have one cause: it is 0.5 times the right one (1/2), as from a mean over 2" in told


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.model.", "params/"])
def test_names_that_end_alike_are_matched_whatever_their_values(prefix):
    model, x, gradients = network()
    found = compare(
        model, "refgrad@numpy", {"x": x, "y_grad": gradients["y"], f"{prefix}w_grad": np.ones((3, 3), np.float32)}
    )
    [tensor] = [tensor for tensor in found.tensors if not tensor.ok]
    assert (tensor.name, tensor.of, tensor.b.verdict) == (f"{prefix}w", ("w",), "wrong")


def test_a_name_of_the_model_is_no_mark():
    """The parameter `grad_w` is no gradient of `w`."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        g (float[2] x) => (float[2] y) <float[2] grad_w = {1, 2}> { y = Mul(x, grad_w) }
    """)
    x = np.float32([3, 4])
    found = compare(model, "refgrad@numpy", {"x": x, "grad_w": np.float32([1, 2]), "grad_w_grad": x})
    assert found.ok
    assert [tensor.name for tensor in found.tensors] == ["grad_w"]


def test_two_gradients_that_are_exchanged_and_transposed_are_named():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        mlp (float[64, 3] x) => (float[64, 3] y) <float[3, 5] w1, float[5, 3] w2> { h = MatMul(x, w1)  y = MatMul(h, w2) }
    """)
    rng = np.random.default_rng(0)
    del model.graph.initializer[:]
    for name, shape in (("w1", (3, 5)), ("w2", (5, 3))):
        value = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    feeds = {"x": rng.standard_normal((64, 3)).astype(np.float32)}
    right = get_backend("numpy").prepare(refgrad.gradient(model, ["w1", "w2"], cotangent="ones")).run(feeds)
    gradients = {"w1_grad": right["w2_grad"].T, "w2_grad": right["w1_grad"].T}
    found = compare(model, "refgrad@numpy", feeds | gradients, wrt=["w1", "w2"], search=False)
    assert {tensor.name: tensor.b.cause for tensor in found.tensors if tensor.kind == "gradient"} == {
        "w1": "it is the gradient of 'w2', and its axes are in the order [1, 0] (transposed)",
        "w2": "it is the gradient of 'w1', and its axes are in the order [1, 0] (transposed)",
    }
    scaled = {name: value / np.float32(64) for name, value in right.items()}
    found = compare(model, "refgrad@numpy", feeds | scaled, wrt=["w1", "w2"], search=False)
    for tensor in found.tensors:
        assert "(1/64), as from a mean over 64 instead of a sum" in tensor.b.cause

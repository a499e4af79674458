from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from checking import assert_gradient, widened
from onnx.reference import ReferenceEvaluator

import refgrad
from refgrad.backends import get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.sampling import cases

PADDINGS = ("zeros", "border", "reflection")


CASES = list(cases())


@pytest.mark.parametrize(
    ("case", "dialect"), [*((c, "onnx") for c in CASES), *((c, "ort") for c in CASES[::8])], ids=str
)
def test_gradient_agrees_with_differences(case: Case, dialect: str) -> None:
    # ONNX Runtime fuses Transpose and MatMul to a node that refuses an empty batch.
    assert_gradient(case, dialect, runtime=case.feeds["X"].size > 0)


def in_the_reference(case: Case) -> bool:
    """True if onnx.reference has this form, and has it right."""
    given = {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    if case.name.startswith("GridSample"):
        full = all(array.size for array in case.feeds.values())  # it returns one axis where there is nothing
        known = given.get("mode", b"linear") in (b"linear", b"nearest", b"cubic")
        return full and known and (given.get("mode"), given.get("padding_mode")) != (b"cubic", b"border")
    two_axes = case.feeds["X"].ndim == 4
    return case.name.startswith("RoiAlign") or (case.name.startswith("DeformConv") and two_axes)


@pytest.mark.parametrize("case", [c for c in CASES if "-static-" in c.name and in_the_reference(c)], ids=str)
def test_forward_is_that_of_the_reference(case: Case) -> None:
    ours = get_backend("numpy").prepare(case.model).run(case.feeds)
    [theirs] = ReferenceEvaluator(case.model).run(None, dict(case.feeds))
    [result] = ours.values()
    np.testing.assert_allclose(result, theirs, atol=2e-6)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("mode", "padding_mode", "align_corners"), [*product(("linear", "nearest", "cubic"), PADDINGS, (0, 1))]
)
@pytest.mark.parametrize("place", ["between", "on pixels"])
def test_torch_samples_a_grid_alike(mode: str, padding_mode: str, align_corners: int, place: str) -> None:
    """Forward and both gradients, on pixels too, where every slope is a choice."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    size = np.array([5, 9] if align_corners else [4, 8])  # whose coordinates are exact
    at = np.stack(np.meshgrid(np.arange(-3, size[1] + 3), np.arange(-3, size[0] + 3)), -1)[None].astype(np.float64)
    if place == "between":
        at += rng.uniform(0, 1, at.shape)
    grid = 2 * at / (size[::-1] - 1) - 1 if align_corners else (2 * at + 1) / size[::-1] - 1
    X, v = rng.standard_normal((1, 2, *size)), rng.standard_normal((1, 2, *at.shape[1:3]))
    tensors = torch.tensor(X, requires_grad=True), torch.tensor(grid, requires_grad=True)
    called = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    expected = torch.nn.functional.grid_sample(*tensors, called, padding_mode, bool(align_corners))
    expected.backward(torch.tensor(v))

    case = node_case("GridSample", X, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)
    run = get_backend("numpy").prepare(refgrad.gradient(case.model, keep_outputs=True)).run
    got = run({**case.feeds, "Y_grad": v})
    np.testing.assert_allclose(got["Y"], expected.detach().numpy(), atol=1e-12)
    for name, tensor in zip(("X", "grid"), tensors, strict=True):
        np.testing.assert_allclose(got[f"{name}_grad"], tensor.grad.numpy(), atol=1e-10)


def test_float16_tells_the_pixels_of_a_large_image_apart() -> None:
    """Coordinates are computed in float32: in float16 there is none between 3000 and 3002."""
    X = np.zeros((1, 1, 1, 4000), np.float16)
    rois = np.array([[3000, 0, 3008, 1]], np.float16)
    case = node_case("RoiAlign", X, rois, np.array([0]), output_width=8, sampling_ratio=1)
    model = refgrad.gradient(case.model, wrt=["X"])
    cotangent = np.arange(8, dtype=np.float16).reshape(1, 1, 1, 8)
    got = get_backend("numpy").prepare(model).run({**case.feeds, "Y_grad": cotangent})["X_grad"]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got[0, 0, 0, 3000:3008], cotangent[0, 0, 0])


def test_a_region_without_samples_has_no_gradient() -> None:
    """A region turned round has none by sampling_ratio 0: all of its bins are 0, whatever X is."""
    X, rois = np.ones((1, 1, 4, 4), np.float32), np.array([[3, 3, 1, 1]], np.float32)
    for mode in ("avg", "max"):
        case = node_case("RoiAlign", X, rois, np.array([0]), mode=mode)
        run = get_backend("numpy").prepare(refgrad.gradient(case.model, keep_outputs=True), precision="float64").run
        got = run({**widened(case.feeds), "Y_grad": np.ones((1, 1, 1, 1))})
        assert not any(value.any() for value in got.values())

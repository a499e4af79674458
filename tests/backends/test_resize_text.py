"""Resize on both executors against the coordinates that the operator's text gives, with lengths that are not whole.

The text calls scale·length_original, a fractional number, the length of the resized tensor in `scale = length_resized /
length_original`, and its rounded value where it counts elements. For align_corners onnx's node tests take the fractional
length, as the authors of the operator intend (onnx/onnx#2462); nothing but the text says anything of the others.
"""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from refgrad.backends import available, get_backend

BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
X = np.array([[[[0, 5, 1, 7], [3, 2, 8, 4], [6, 1, 0, 9], [2, 7, 5, 3], [4, 0, 6, 1]]]], np.float32)
ROI = ((0.2, 0.8), (0.1, 0.9))  # of rows, of columns
LENGTHS = {"whole": (2.0, 3.0), "longer": (1.3, 1.7), "shorter": (0.6, 0.7), "of one": (0.3, 0.4), "sizes": (3, 7)}
MODES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "asymmetric",
    "align_corners",
    "tf_crop_and_resize",
)


def places(mode: str, before: int, given: float, roi: tuple[float, float], rounds: bool) -> np.ndarray:
    """The coordinates x_original of each element of the resized axis."""
    if isinstance(given, int):
        count, width, scale = given, float(given), given / before
    else:
        count, width, scale = int(np.floor(np.float32(before) * np.float32(given))), before * given, given
    x, last = np.arange(count, dtype=np.float64), before - 1
    match mode:
        case "half_pixel":
            return (x + 0.5) / scale - 0.5
        case "half_pixel_symmetric":
            return before / 2 * (1 - count / width) + (x + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (x + 0.5) / scale - 0.5 if count > 1 else 0 * x
        case "asymmetric":
            return x / scale
        case "align_corners":
            spread = (count if rounds else width) - 1
            return x * last / spread if spread else 0 * x
        case _:
            start, end = roi
            inside = start * last + x * (end - start) * last / max(count - 1, 1)
            return inside if count > 1 else 0 * x + 0.5 * (start + end) * last


def read(values: np.ndarray, at: np.ndarray, axis: int) -> np.ndarray:
    """The values between the elements of an axis; its ends go on outside."""
    last = values.shape[axis] - 1
    below = np.floor(at).astype(int)
    part = (at - below).reshape([-1 if k == axis else 1 for k in range(values.ndim)])
    first, second = (values.take(np.clip(below + k, 0, last), axis) for k in (0, 1))
    return first * (1 - part) + second * part


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_text_is_followed(mode: str, kind: str, backend: str) -> None:
    given = LENGTHS[kind]
    what, array = ("sizes", "int64") if kind == "sizes" else ("scales", "float")
    numbers = ", ".join(map(str, (1, 1, *given)))
    roi = "0, 0, 0.2, 0.1, 1, 1, 0.8, 0.9"
    inputs = "X, roi, , sizes" if kind == "sizes" else "X, roi, scales"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[1,1,5,4] X) => (float[1,1,A,B] Y) '
        f"<float[8] roi = {{{roi}}}, {array}[4] {what} = {{{numbers}}}> "
        f'{{ Y = Resize <mode = "linear", coordinate_transformation_mode = "{mode}"> ({inputs}) }}'
    )
    # ONNX Runtime aligns the corners of the rounded length: a finding.
    rounds = backend == "ort-cpu"
    rows, columns = (places(mode, n, g, r, rounds) for n, g, r in zip((5, 4), given, ROI, strict=True))
    expected = read(read(X.astype(np.float64), rows, 2), columns, 3)
    [got] = get_backend(backend).prepare(model).run({"X": X}).values()
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-4)

"""Convolutions and poolings in blocks of any size: against loops over every element, written from the text of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from refgrad.backends import get_backend
from refgrad.backends.numpy.kernels import convolution, windows

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

NUMPY = get_backend("numpy")
BLOCKS = [(300, 4), (2500, 4), (windows.WORKSPACE, 256)]  # bytes, and columns that are enough for a product

# X, W, attributes
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((3, 2, 9), (3, 2, 4), {"strides": [2], "pads": [1, 2]}),
    ((1, 1, 7), (2, 1, 2), {"pads": [3, 2]}),  # windows in the pads alone
    ((2, 3, 5, 6), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((5, 3, 2, 2), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),  # small images side by side
    ((5, 4, 2, 2), (6, 2, 3, 3), {"pads": [1, 1, 1, 1], "group": 2}),
    ((3, 2, 7, 8), (3, 2, 6, 7), {}),  # windows larger than they are many
    ((4, 2, 8, 8), (3, 2, 4, 4), {"strides": [4, 4]}),  # that do not meet
    ((2, 4, 7, 6), (4, 1, 3, 2), {"group": 4, "strides": [2, 1], "dilations": [2, 3]}),
    ((2, 2, 9, 9), (4, 2, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 2, 8, 8), (2, 2, 3, 3), {"strides": [2, 2], "dilations": [2, 2]}),
    ((2, 6, 5, 5), (3, 6, 1, 1), {"strides": [2, 2]}),
    ((2, 5, 4, 4), (3, 5, 1, 1), {}),
    ((1, 20, 3, 3), (2, 20, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 2, 3, 4, 5), (4, 1, 2, 2, 3), {"group": 2, "pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]}),
]
POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 9), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    ((2, 1, 6), {"kernel_shape": [2], "dilations": [3], "pads": [1, 1]}),
    ((2, 3, 7, 8), {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 2, 1]}),
    ((1, 2, 6, 6), {"kernel_shape": [2, 2], "dilations": [2, 3], "pads": [2, 0, 0, 0]}),
    ((1, 2, 4, 5, 6), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2]}),
    ((1, 1, 5, 30), {"kernel_shape": [5, 300], "pads": [0, 299, 0, 0]}),  # more elements than a byte counts
]


@pytest.fixture(params=BLOCKS, ids=lambda block: f"{block[0]}bytes")
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (windows, convolution):
        monkeypatch.setattr(module, "WORKSPACE", request.param[0])
    monkeypatch.setattr(windows, "_ENOUGH", request.param[1])


def run(op: str, feeds: dict[str, np.ndarray], outputs: dict[str, int], opset: int = 20, **attributes: Any) -> Any:
    """The outputs, by name and type, of one node on `feeds`."""
    value = helper.make_tensor_value_info
    domain = "com.microsoft" if op in ("ConvGrad", "ConvTransposeGrad") else ""
    shapes = attributes.pop("shapes", {})
    graph = helper.make_graph(
        [helper.make_node(op, list(feeds), list(outputs), domain=domain, **attributes)],
        "node",
        [value(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()],
        [value(k, v, shapes.get(k)) for k, v in outputs.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=onnx.IR_VERSION - 3)
    return tuple(NUMPY.prepare(model).run(feeds)[name] for name in outputs)


def meetings(
    size: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any]
) -> tuple[tuple[int, ...], Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]]:
    """How many windows there are along each axis, and for each window and element of it the coordinates that they meet at."""
    rank = len(size)
    strides, dilations = attributes.get("strides", [1] * rank), attributes.get("dilations", [1] * rank)
    pads = attributes.get("pads", [0] * 2 * rank)
    count = tuple(
        (n + pads[a] + pads[a + rank] - ((kernel[a] - 1) * dilations[a] + 1)) // strides[a] + 1
        for a, n in enumerate(size)
    )

    def each() -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        for o in product(*map(range, count)):
            for k in product(*map(range, kernel)):
                at = tuple(o[a] * strides[a] + k[a] * dilations[a] - pads[a] for a in range(rank))
                if all(0 <= at[a] < size[a] for a in range(rank)):
                    yield o, k, at

    return count, each()


def label(value: Any) -> str:
    return str(value).replace(" ", "")


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("value", [1.0, np.inf, np.nan])
@pytest.mark.parametrize("strides", [[1, 1], [2, 1]])
def test_a_kernel_that_copies_elements_gives_what_products_give(value: float, strides: list[int]) -> None:
    X = np.arange(1, 61, dtype=np.float32).reshape(3, 1, 4, 5)
    X[1, 0, 2, 3] = value
    W = np.eye(6, dtype=np.float32)[[5, 0, 3, 3]].reshape(4, 1, 2, 3)
    attributes = {"pads": [1, 2, 0, 1], "strides": strides}
    (Y,) = run("Conv", {"X": X, "W": W}, {"Y": TensorProto.FLOAT}, **attributes)
    padded = np.pad(X, ((0, 0), (0, 0), (1, 0), (2, 1)))
    windows_of = np.lib.stride_tricks.sliding_window_view(padded, (2, 3), (2, 3))[:, :, :: strides[0], :: strides[1]]
    with np.errstate(invalid="ignore"):
        expected = (windows_of * W[:, 0, np.newaxis, np.newaxis]).sum((-2, -1))
    np.testing.assert_array_equal(Y, expected)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=label)
def test_convolutions(case: tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]) -> None:
    x_shape, w_shape, attributes = case
    rng = np.random.default_rng(0)
    X, W = rng.standard_normal(x_shape), rng.standard_normal(w_shape)
    group, C = attributes.get("group", 1), w_shape[1]
    M = w_shape[0] // group
    count, each = meetings(x_shape[2:], w_shape[2:], attributes)
    B, dY = rng.standard_normal(w_shape[0]), rng.standard_normal((x_shape[0], w_shape[0], *count))
    Y, dX, dW = np.zeros(dY.shape), np.zeros(x_shape), np.zeros(w_shape)
    for o, k, at in each:
        for g, m, c in product(range(group), range(M), range(C)):
            to, of = g * M + m, g * C + c
            Y[(slice(None), to, *o)] += W[(to, c, *k)] * X[(slice(None), of, *at)]
            dX[(slice(None), of, *at)] += W[(to, c, *k)] * dY[(slice(None), to, *o)]
            dW[(to, c, *k)] += X[(slice(None), of, *at)] @ dY[(slice(None), to, *o)]
    double = TensorProto.DOUBLE
    close = {"rtol": 1e-12, "atol": 1e-12}
    (got,) = run("Conv", {"X": X, "W": W, "B": B}, {"Y": double}, **attributes)
    np.testing.assert_allclose(got, Y + B.reshape(-1, *[1] * len(count)), **close)
    for result, expected in zip(
        run("ConvGrad", {"dY": dY, "X": X, "W": W}, dict.fromkeys(("dX", "dW", "dB"), double), **attributes),
        (dX, dW, dY.sum((0, *range(2, dY.ndim)))),
        strict=True,
    ):
        np.testing.assert_allclose(result, expected, **close)
    # The windows of ConvTranspose lie over its output, and what they do not reach is output_padding.
    strides = attributes.get("strides", [1] * len(count))
    (least,) = run("ConvTranspose", {"X": dY, "W": W}, {"Y": double}, **attributes)
    rest = [n - m for n, m in zip(x_shape[2:], least.shape[2:], strict=True)]
    assert all(0 <= r < s for r, s in zip(rest, strides, strict=True))
    (got,) = run("ConvTranspose", {"X": dY, "W": W}, {"Y": double}, output_padding=rest, **attributes)
    np.testing.assert_allclose(got, dX, **close)
    attributes = {**attributes, "output_padding": rest}
    got = run("ConvTransposeGrad", {"dY": X, "X": dY, "W": W}, {"dX": double, "dW": double}, **attributes)
    np.testing.assert_allclose(got[0], Y, **close)
    np.testing.assert_allclose(got[1], dW, **close)
    if group == 1:
        columns = np.zeros((x_shape[0], C, *w_shape[2:], *count))
        columns += rng.standard_normal(columns.shape)
        image = np.zeros(x_shape)
        for o, k, at in meetings(x_shape[2:], w_shape[2:], attributes)[1]:
            image[(..., *at)] += columns[(slice(None), slice(None), *k, *o)]
        feeds = {
            "columns": columns.reshape(x_shape[0], -1, int(np.prod(count))),
            "image_shape": np.array(x_shape[2:]),
            "block_shape": np.array(w_shape[2:]),
        }
        laid = {name: attributes[name] for name in ("strides", "pads", "dilations") if name in attributes}
        np.testing.assert_allclose(run("Col2Im", feeds, {"Y": double}, **laid)[0], image, **close)


def kinds() -> dict[str, np.ndarray]:
    """Numbers to pool: all different; many equal; with infinities only in places; with NaN."""
    rng = np.random.default_rng(1)
    different, equal = rng.permutation(1000).astype(np.float64), rng.integers(0, 3, 1000).astype(np.float64)
    low = np.where(rng.random(1000) < 0.7, -np.inf, equal)
    return {"different": different, "equal": equal, "low": low, "nan": np.where(rng.random(1000) < 0.2, np.nan, equal)}


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("storage_order", [0, 1])
@pytest.mark.parametrize("kind", ["different", "equal", "low", "nan"])
@pytest.mark.parametrize("case", POOLS, ids=label)
def test_max_pool(case: tuple[tuple[int, ...], dict[str, Any]], kind: str, storage_order: int) -> None:
    shape, attributes = case
    X = np.resize(kinds()[kind], shape)
    count, each = meetings(shape[2:], tuple(attributes["kernel_shape"]), attributes)
    images = np.arange(shape[0] * shape[1]).reshape(shape[:2]) * int(np.prod(shape[2:]))
    Y, indices = np.full((*shape[:2], *count), -np.inf), np.full((*shape[:2], *count), -1)
    for o, _, at in each:
        flat = int(np.ravel_multi_index(at, shape[2:], order="F" if storage_order else "C"))
        for n, c in np.ndindex(*shape[:2]):
            x, to = X[(n, c, *at)], (n, c, *o)
            if indices[to] < 0 or x > Y[to] or (np.isnan(x) and not np.isnan(Y[to])):
                Y[to], indices[to] = x, images[n, c] + flat
    types = {"Y": TensorProto.DOUBLE, "I": TensorProto.INT64}
    got = run("MaxPool", {"X": X}, types, storage_order=storage_order, **attributes)
    np.testing.assert_array_equal(got[0], Y)
    np.testing.assert_array_equal(got[1], indices)
    np.testing.assert_array_equal(run("MaxPool", {"X": X}, {"Y": TensorProto.DOUBLE}, **attributes)[0], Y)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("case", POOLS, ids=label)
def test_sums_over_windows(case: tuple[tuple[int, ...], dict[str, Any]]) -> None:
    shape, attributes = case
    X = np.random.default_rng(2).standard_normal(shape)
    kernel = tuple(attributes["kernel_shape"])
    count, each = meetings(shape[2:], kernel, attributes)
    dY = np.random.default_rng(3).standard_normal((*shape[:2], *count))
    total, cubes, number, dX = np.zeros(dY.shape), np.zeros(dY.shape), np.zeros(count), np.zeros(shape)
    met = list(each)
    for o, _, at in met:
        total[(..., *o)] += X[(..., *at)]
        cubes[(..., *o)] += np.abs(X[(..., *at)]) ** 3
        number[o] += 1
    for o, _, at in met:
        dX[(..., *at)] += dY[(..., *o)] / number[o]
    double = {"Y": TensorProto.DOUBLE}
    np.testing.assert_allclose(run("AveragePool", {"X": X}, double, **attributes)[0], total / number, rtol=1e-12)
    padded = run("AveragePool", {"X": X}, double, count_include_pad=1, **attributes)[0]
    np.testing.assert_allclose(padded, total / np.prod(kernel), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(run("LpPool", {"X": X}, double, p=3, **attributes)[0], np.cbrt(cubes), rtol=1e-12)
    (got,) = run("AveragePoolGrad", {"dY": dY}, double, shapes={"Y": shape}, **attributes)
    np.testing.assert_allclose(got, dX, rtol=1e-12, atol=1e-15)

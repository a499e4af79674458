"""ONNX Runtime's rotary embeddings and position biases: bad inputs, short types, second derivatives."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx
import pytest
from checking import assert_gradient, assert_second_derivative
from numpy_graphs import undeclared

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.errors import BackendError, NoGradientError
from refgrad.microsoft.cases import position
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.stock, pytest.mark.slow]

NUMPY = get_backend("numpy")
CASES = list(position.cases())
ROTARY: dict[str, np.ndarray] = {
    "x": np.ones((2, 3, 8), np.float32),
    "p": np.zeros((2, 3), np.int64),
    "c": np.ones((6, 2), np.float32),
    "s": np.ones((6, 2), np.float32),
}
SHORT = {name: np.ones((2, 2), np.float32) for name in "cs"}


def node(operator: str, inputs: dict[str, np.ndarray], outputs: int = 1) -> onnx.ModelProto:
    """A model of one node of com.microsoft, with attributes behind its name."""
    names = [f"y{k}" for k in range(outputs)]
    body = f"{', '.join(names)} = com.microsoft.{operator} ({', '.join(inputs)})"
    return undeclared(body, inputs, names, 21)


@pytest.mark.parametrize(
    ("attributes", "changed", "said"),
    [
        ("", {"p": np.array([4])}, "position_ids contain 6, which is out of bounds for 6 elements: 0..5"),
        ("", {"p": np.array([[0, 1, -1]] * 2)}, "position_ids contain -1"),
        ("", {"p": np.zeros((1, 3), np.int64)}, r"position_ids has the shape \[1, 3\]; it is .* \[2, 3\]"),
        ("", {"s": np.ones((5, 2), np.float32)}, r"sin_cache has the shape \[5, 2\]; it is \[6, 2\]"),
        ("", SHORT, "a sequence of 3 is longer than the caches, which have 2 positions"),
        ("", {"x": np.ones((2, 8), np.float32)}, "its input input is of rank 2; it has 3 or 4 axes"),
        ("<num_heads = 3>", {}, "num_heads=3, or heads of 4, do not divide the 8 features"),
        ("<num_heads = 4>", {}, "caches of 2 pairs turn 4 elements, and 2 of 2 are to be turned"),
        ("<num_heads = 2, rotary_embedding_dim = 3>", {}, "rotary_embedding_dim is 3; pairs need an even number"),
        ("<rotary_embedding_dim = 4>", {}, "rotary_embedding_dim needs num_heads; add it"),
    ],
)
def test_a_bad_rotary_embedding_is_refused_by_name(attributes: str, changed: dict[str, np.ndarray], said: str) -> None:
    feeds = ROTARY | changed
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(node(f"RotaryEmbedding {attributes}", feeds)).run(feeds)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("mrope_section = [1, 1, 1], num_heads = 2", r"mrope_section is \[1, 1, 1\]; its counts of pairs add up to 2"),
        ("mrope_section = [1, 2, -1], num_heads = 2", r"mrope_section is \[1, 2, -1\]; it has three counts"),
        ("mrope_section = [1, 1, 0], num_heads = 2, mrope_layout = 2", "mrope_layout is 2; there are 0 and 1"),
        ("mrope_section = [1, 1, 0], num_heads = 3", "do not divide the 8 features of input"),
        ("mrope_section = [1, 1, 0]", "an input of rank 3 needs num_heads; add it"),
    ],
)
def test_bad_sections_are_refused_by_name(attributes: str, said: str) -> None:
    feeds = ROTARY | {"p": np.zeros((3, 2, 3), np.int64)}
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(node(f"MRotaryEmbedding <{attributes}>", feeds)).run(feeds)


@pytest.mark.parametrize("sections", [[1, 1], [1, 2, -1], [2**40, 1, 1]])
def test_sections_that_are_no_three_counts_have_no_gradient(sections: list[int]) -> None:
    """And nothing is allocated for them."""
    cases = (c for c in CASES if c.operator == "com.microsoft.MRotaryEmbedding" and c.static)
    model = onnx.ModelProto.FromString(next(cases).model.SerializeToString())
    [given] = (a for a in model.graph.node[-1].attribute if a.name == "mrope_section")
    given.CopyFrom(onnx.helper.make_attribute("mrope_section", sections))
    with pytest.raises(NoGradientError, match="it has three counts of pairs, of at most 65536 together"):
        refgrad.gradient(model)


@pytest.mark.parametrize("name", ["RotaryEmbedding", "MRotaryEmbedding"])
def test_in_float16_as_onnx_runtime(name: str) -> None:
    if "ort-cpu" not in available():
        pytest.skip("onnxruntime is not installed")
    for case in CASES:
        if case.operator != f"com.microsoft.{name}" or not case.static:
            continue
        if len(case.feeds) == len(case.node.input) and all(array.size for array in case.feeds.values()):
            short = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in case.feeds.items()}
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in case.node.attribute}
            model = node_case(name, *short.values(), domain=MICROSOFT, opset=1, **attributes).model
            got, expected = (get_backend(b).prepare(model).run(short)["output"] for b in ("numpy", "ort-cpu"))
            np.testing.assert_allclose(got, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("name", sorted({case.operator.removeprefix("com.microsoft.") for case in CASES}))
def test_the_second_derivative(name: str) -> None:
    assert_second_derivative(next(case for case in CASES if case.operator == f"com.microsoft.{name}"), directions=1)


@pytest.mark.parametrize(
    ("operator", "inputs", "said"),
    [
        ("RotaryEmbedding <rotary_embedding_dim = 2>", ROTARY, "rotary_embedding_dim needs num_heads; add it"),
        ("MRotaryEmbedding <mrope_section = [1, 1, 0]>", ROTARY, "an input of rank 3 needs num_heads; add it"),
        (
            "RotaryEmbedding",
            ROTARY | {"x": np.ones((2, 8), np.float32)},
            "its input input is of rank 2; it has 3 or 4 axes",
        ),
    ],
)
def test_a_form_that_is_not_valid_has_no_gradient(operator: str, inputs: dict[str, np.ndarray], said: str) -> None:
    model = node(operator, inputs)
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y0", onnx.TensorProto.FLOAT, ["a", "b", "c"]))
    with pytest.raises(NoGradientError, match=said):
        refgrad.gradient(model, wrt=["x"])


def test_the_gemma_angles_are_those_of_the_tokens() -> None:
    """The script in ONNX Runtime's documentation makes an axis for the heads, and then forgets it."""
    rng = np.random.default_rng(0)
    feeds = {"e": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    feeds |= {n: rng.standard_normal((2, 2, 3, 4)).astype(np.float16) for n in ("q", "r", "k", "t")}
    one, two = NUMPY.prepare(node("GemmaRotaryEmbedding", feeds, 2)).run(feeds).values()
    cos, sin = np.cos(feeds["e"])[:, None], np.sin(feeds["e"])[:, None]
    assert one.dtype == np.float16
    np.testing.assert_allclose(one, feeds["q"] * cos + feeds["r"] * sin, rtol=2e-2, atol=4e-3)
    np.testing.assert_allclose(two, feeds["k"] * cos + feeds["t"] * sin, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.operator == "com.microsoft.RMSNormRotary" and c.static], ids=str
)
def test_rms_norm_rotary_by_its_scale_and_its_caches_in_double(case: Case) -> None:
    assert_gradient(dataclasses.replace(case, wrt=None), runtime=False)


def test_rms_norm_rotary_is_a_normalization_and_a_rotary_embedding() -> None:
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 3, 2, 8)).astype(ml_dtypes.bfloat16), rng.standard_normal(8).astype(np.float32)
    angles = rng.standard_normal((6, 2))
    caches = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    given = (x, scale, np.array([2]), *caches)
    case = node_case("RMSNormRotary", *given, domain=MICROSOFT, opset=1, outputs=2, rotary_embedding_dim=4)
    y, normalized = NUMPY.prepare(case.model).run(case.feeds).values()
    wide = x.astype(np.float32)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(normalized, expected, rtol=1e-5, atol=1e-6)
    case = node_case(
        *("RotaryEmbedding", expected.reshape(2, 3, 16), np.array([2]), *caches),
        domain=MICROSOFT, opset=1, num_heads=2, rotary_embedding_dim=4,
    )  # fmt: skip
    assert y.dtype == ml_dtypes.bfloat16
    turned = NUMPY.prepare(case.model).run(case.feeds)["output"]
    np.testing.assert_allclose(y.astype(np.float32), turned, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("rotary_embedding_dim = 3", "rotary_embedding_dim is 3; it is even and positive, up to 8"),
        ("rotary_embedding_dim = 10", "rotary_embedding_dim is 10; it is even and positive, up to 8"),
        ("rotary_embedding_dim = 4, input_start = 2, input_width = 7", "a head of X has 8 elements"),
    ],
)
def test_a_bad_part_of_a_head_is_refused_by_name(attributes: str, said: str) -> None:
    feeds = {"x": np.ones((2, 3, 2, 8), np.float16), "w": np.ones(8, np.float32)}
    feeds |= {name: ROTARY[name] for name in "pcs"}
    with pytest.raises(BackendError, match=said):
        NUMPY.prepare(node(f"RMSNormRotary <{attributes}>", feeds)).run(feeds)

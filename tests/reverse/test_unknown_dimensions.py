"""A text on an axis that is no name, such as "?", promises nothing: two axes with it may have other sizes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.locating.comparing import compare
from refgrad.errors import FeedError, RefgradError
from refgrad.planning.program import ANY
from refgrad.protos.types import dimension

X, Y = np.float32([3]), np.float32([1, 2, 4, 8])


def product(text):
    kind = f'float["{text}"]'
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g ({kind} x, {kind} y) => ({kind} z) {{ z = Mul(x, y) }}'
    )


@pytest.mark.parametrize(
    ("text", "is_promise"),
    [
        *((text, True) for text in ("N", "batch_size", "größe", "2*N", "floor(N/2) + 1", "s0 - s1", "Max(1, N)")),
        *((text, False) for text in ("?", "-1", "*", "...", "", " ", "1", "2*3", "<unk>", "what size?")),
    ],
)
def test_names_and_formulas_are_promises(text, is_promise):
    assert dimension(onnx.TensorShapeProto.Dimension(dim_param=text)) == (text if is_promise else None)


@pytest.mark.parametrize("backend", sorted({"numpy", "ort-cpu"} & set(available())))
@pytest.mark.parametrize("text", ["?", "-1", "*", "any size"])
def test_axes_with_a_text_that_is_no_name_may_differ(text, backend):
    gradient = refgrad.gradient(product(text))
    made = get_backend(backend).prepare(gradient).run({"x": X, "y": Y, "z_grad": np.ones(4, np.float32)})
    assert np.array_equal(made["x_grad"], [15])
    assert np.array_equal(made["y_grad"], [3, 3, 3, 3])
    assert np.array_equal(get_backend(backend).prepare(product(text)).run({"x": X, "y": Y})["z"], X * Y)


def test_a_name_is_a_promise():
    with pytest.raises(FeedError, match="Dimension 'N' is 1 on axis 0 of 'x' and 4 on axis 0 of 'y'"):
        get_backend("numpy").prepare(product("N")).run({"x": X, "y": Y})


def test_other_commands_take_such_axes():
    assert compare(product("?"), "refgrad@numpy", "refgrad@numpy", {"x": X, "y": Y}).ok
    assert refgrad.cost(product("?"), {ANY: 4}).nodes
    with pytest.raises(RefgradError, match="has neither a size nor a name"):
        refgrad.cost(product("?"))

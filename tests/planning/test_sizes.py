"""`refgrad.cost` finds the sizes of cotangents, and computes sizes that are formulas of symbols."""

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

import refgrad
from refgrad.errors import InvalidModelError, OptionError
from refgrad.planning.sizes import size_of

pytestmark = pytest.mark.interpreter

KNOWN = {"H": 48, "W": 30, "N": 2}


@pytest.mark.parametrize(
    ("symbol", "size"),
    [
        ("H", 48),
        (7, 7),
        (None, None),
        ("other", None),
        ("floor(H/4 - 1/4) + 1", 12),
        ("ceiling(W/4)", 8),
        ("2*floor((H + 1)/2)", 48),
        ("H//32", 1),
        ("W/4", None),  # no whole number
        ("-H", None),
        ("H + other", None),
        ("H + ", None),
        ("max(H, W) - min(H, W)", 18),
        ("__import__('os').system('echo')", None),
        ("H.real", None),
        ("H/0", None),
        ("9**9**9", None),
        ("99999999999*99999999999", None),  # more than a dimension can have
        ("(" * 300 + "H" + ")" * 300, None),
        ("?", None),
    ],
)
def test_the_size_of_a_dimension(symbol: int | str | None, size: int | None) -> None:
    assert size_of(symbol, KNOWN) == size


def detector(end: str, height: str, width: str) -> ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> det (float[N,3,H,W] x) => (float[N,2,{height},{width}] y)
        <float[4] up = {{1, 1, 2, 2}}> {{
        c = Conv<strides=[2,2],pads=[1,1,1,1]>(x, k) r = Relu(c) d = Conv<strides=[2,2],pads=[1,1,1,1]>(r, j, b)
        u = Resize(d, , up) y = {end}(u) }}"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("k", (4, 3, 3, 3)), ("j", (2, 4, 3, 3)), ("b", (2,))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return model


@pytest.mark.parametrize("end", ["Sigmoid", "Identity"])
@pytest.mark.parametrize("names", [("Ho", "Wo"), ("?", "?")], ids=str)
@pytest.mark.parametrize("wrt", [["x"], ["x", "k", "b"]], ids=str)
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_the_cost_of_a_gradient_needs_the_sizes_of_the_inputs_alone(end, names, wrt, dialect) -> None:
    gradient = refgrad.gradient(detector(end, *names), wrt=wrt, dialect=dialect)
    found = refgrad.cost(gradient, {"N": 2, "H": 64, "W": 32})
    fixed = detector(end, "32", "16")
    for dim, size in zip(fixed.graph.input[0].type.tensor_type.shape.dim, (2, 3, 64, 32), strict=True):
        dim.dim_value = size
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    expected = refgrad.cost(refgrad.gradient(fixed, wrt=wrt, dialect=dialect))
    assert (found.feeds, found.results) == (expected.feeds, expected.results)


def test_a_size_that_nothing_implies_is_asked_for_by_the_shortest_name() -> None:
    gradient = refgrad.gradient(detector("Identity", "a_long_name", "unk"))
    with pytest.raises(OptionError, match="size 'H' of input 'x' is not known"):
        refgrad.cost(gradient, {"N": 2})
    del gradient.metadata_props[:]
    with pytest.raises(OptionError, match="size 'unk' of input 'y_grad' is not known"):
        refgrad.cost(gradient, {"N": 2, "H": 64, "W": 32})
    assert refgrad.cost(gradient, {"N": 2, "H": 64, "W": 32, "unk": 16, "a_long_name": 32}).flops


@pytest.mark.parametrize("text", ["[]", '{"y": []}', "{"])
def test_names_of_a_stranger_are_refused(text: str) -> None:
    gradient = refgrad.gradient(detector("Identity", "Ho", "Wo"))
    [entry] = [one for one in gradient.metadata_props if one.key == "refgrad.cotangents"]
    entry.value = text
    with pytest.raises(InvalidModelError, match=r"refgrad\.cotangents .* Remove it"):
        refgrad.cost(gradient, {"N": 2, "H": 64, "W": 32})


def test_metadata_of_a_stranger_are_ignored() -> None:
    gradient = refgrad.gradient(detector("Identity", "Ho", "Wo"))
    [entry] = [one for one in gradient.metadata_props if one.key == "refgrad.way_to_outputs"]
    for text in ("", "{}", '"no base64!"', '"AAAA"', f'"{"/" * 4000}"', f'"{"A" * (1 << 18)}"'):
        entry.value = text
        with pytest.raises(OptionError, match="size 'Ho' of input 'y_grad'"):
            refgrad.cost(gradient, {"N": 2, "H": 64, "W": 32})

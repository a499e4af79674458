"""Every row of the table of kinks, against refgrad, torch and ONNX Runtime's builder."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.kinks import at
from refgrad.conformance.known.bugs.bug import TRAINING, VERSIONS
from refgrad.derivatives import ortbuilder
from refgrad.tables.kinks import CONVENTIONS, KINKS, KinkRow, Point
from refgrad.tables.missing import MISSING
from refgrad.tables.torch_functions import ASKED, FOLLOWED, RELEASE, exported_function


def case(kink: KinkRow, dtype: type = np.float64) -> Case:
    return at(kink, dtype)


def gradients(model: onnx.ModelProto, kink: KinkRow, backend: str, dtype: type) -> dict[str, np.ndarray]:
    prepared = get_backend(backend).prepare(model)
    feeds = dict(case(kink, dtype).feeds)
    forward = get_backend("numpy").prepare(case(kink, dtype).model).run(feeds)
    feeds |= {f"{name}_grad": np.ones_like(value) for name, value in forward.items()}
    return prepared.run({value.name: feeds[value.name] for value in prepared.inputs})


def expect(got: dict[str, np.ndarray], kink: KinkRow, expected: Point) -> None:
    for name, value in zip(case(kink).feeds, expected, strict=True):
        if value is not None:
            np.testing.assert_allclose(
                got[f"{name}_grad"], np.array(value), rtol=1e-6, err_msg=f"{kink.operator} {name}"
            )


@pytest.mark.parametrize("kink", KINKS, ids=lambda k: f"{k.operator}: {k.where}")
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_ours(kink: KinkRow, dialect: str) -> None:
    model = refgrad.gradient(case(kink).model, dialect=dialect)
    expect(gradients(model, kink, "numpy", np.float64), kink, kink.ours)
    if (
        "ort-cpu" in available()
        and (dialect == "onnx" or ortbuilder.available())
        and runs_right(case(kink, np.float32))
    ):
        narrow = refgrad.gradient(case(kink, np.float32).model, dialect=dialect)
        expect(gradients(narrow, kink, "ort-cpu", np.float32), kink, kink.ours)


@pytest.mark.parametrize("kink", KINKS, ids=lambda k: f"{k.operator}: {k.where}")
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("convention", CONVENTIONS[1:])
def test_the_convention_that_is_asked_for(kink: KinkRow, dialect: str, convention: str) -> None:
    model = refgrad.gradient(case(kink).model, dialect=dialect, kinks=convention)
    expect(gradients(model, kink, "numpy", np.float64), kink, kink.choice(convention))


def test_a_constant_exponent_of_zero() -> None:
    made = node_case("Pow", np.zeros(1), np.array(0.0), constant=("Y",), wrt=("X",))
    for convention, expected in (("refgrad", 0.0), ("torch", 0.0), ("onnxruntime", np.nan)):
        model = refgrad.gradient(made.model, wrt=["X"], kinks=convention)
        got = get_backend("numpy").prepare(model).run({"X": np.zeros(1), "Z_grad": np.ones(1)})["X_grad"]
        np.testing.assert_array_equal(got, [expected])


def runs_right(made: Case) -> bool:
    """True if ONNX Runtime gets the function itself right: 1.19.2 has NaN for ReduceLogSumExp of −∞."""
    results = [get_backend(name).prepare(made.model).run(made.feeds) for name in ("numpy", "ort-cpu")]
    return all(np.array_equal(results[0][name], results[1][name], equal_nan=True) for name in results[0])


@pytest.mark.parametrize("kink", [k for k in KINKS if k.ort is not None], ids=lambda k: f"{k.operator}: {k.where}")
@pytest.mark.skipif(not ortbuilder.available(), reason="needs ONNX Runtime's gradient builder")
def test_onnx_runtime(kink: KinkRow) -> None:
    assert kink.ort is not None
    import onnxruntime

    assert onnxruntime.__version__ == VERSIONS[TRAINING]
    made = case(kink, np.float32)
    wrt = [name for name, value in zip(made.feeds, kink.ort, strict=True) if value is not None]
    output = made.model.graph.output[0].name
    expect(gradients(ortbuilder.build_raw(made.model, wrt, output), kink, "ort-cpu", np.float32), kink, kink.ort)


@pytest.mark.torch
@pytest.mark.parametrize("kink", [k for k in KINKS if k.torch is not None], ids=lambda k: f"{k.operator}: {k.where}")
def test_torch(kink: KinkRow) -> None:
    torch_has(kink, ASKED[kink.operator, kink.where])


def torch_has(kink: KinkRow, question: str) -> None:
    torch = pytest.importorskip("torch")
    assert kink.torch is not None
    inputs = [torch.from_numpy(x) for x in case(kink).feeds.values()]
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    asked(torch, question, inputs).sum().backward()
    for tensor, expected in zip(inputs, kink.torch, strict=True):
        if expected is not None:
            np.testing.assert_allclose(tensor.grad.numpy(), np.array(expected), rtol=1e-6)


def asked(torch: Any, expression: str, inputs: list[Any]) -> Any:
    """The gradient that torch returns for an expression of the page."""
    names = dict(zip("xyz", inputs, strict=False))
    scope = (
        {"__builtins__": {}}
        | vars(torch)
        | {"abs": torch.abs, "max": torch.max, "min": torch.min, "round": torch.round}
    )
    return eval(expression, scope | names)


def test_every_answer_of_torch_has_its_question() -> None:
    assert {(k.operator, k.where) for k in KINKS if k.torch is not None} == ASKED.keys()


@pytest.mark.torch
def test_the_releases_are_those_of_the_page() -> None:
    torch = pytest.importorskip("torch")
    assert torch.__version__.startswith(f"{RELEASE}.")


def test_torch_disagrees_only_where_the_reason_says_so() -> None:
    assert {k.operator for k in KINKS if not k.agreed} == {"Pow", "ReduceLogSumExp"}


@pytest.mark.parametrize("row", MISSING, ids=lambda row: row.operator)
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_ours_where_a_number_is_missing(row: KinkRow, dialect: str) -> None:
    if dialect == "onnx":
        test_ours(row, dialect)
    else:  # in double: in float32 the kernels of ONNX Runtime have their own way with NaN
        model = refgrad.gradient(case(row).model, dialect=dialect)
        expect(gradients(model, row, "numpy", np.float64), row, row.choice("onnxruntime"))


@pytest.mark.torch
@pytest.mark.parametrize("row", [row for row in MISSING if row.torch is not None], ids=lambda row: row.operator)
def test_torch_where_a_number_is_missing(row: KinkRow) -> None:
    torch_has(row, next(question for (operator, _), question in ASKED.items() if operator == row.operator))


# Functions of torch that share an operator


def written_for(kink: KinkRow, function: str) -> onnx.ModelProto:
    """The operator of a row, with what torch's exporter writes beside it."""
    model = case(kink).model
    target = f"call_function[target=torch.ops.aten.{function if '.' in function else function + '.default'}]"
    layers = "['torch.nn.modules.pooling.AdaptiveMaxPool1d', 'aten.amax.default']"
    written = {"pkg.torch.onnx.fx_node": f"%a : [num_users=1] = {target}(args = (%x,), kwargs = {{}})"}
    if function == "adaptive_max_pool":
        written = {"pkg.torch.onnx.class_hierarchy": layers}
    for key, value in written.items():
        model.graph.node[0].metadata_props.add(key=key, value=value)
    return model


@pytest.mark.parametrize(("function", "question", "kink"), FOLLOWED, ids=[name for name, _, _ in FOLLOWED])
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_a_function_that_the_exporter_names_is_followed(
    function: str, question: str, kink: KinkRow, dialect: str
) -> None:
    model = written_for(kink, function)
    assert exported_function(model.graph.node[0]) == function
    for convention in CONVENTIONS:
        made = refgrad.gradient(model, dialect=dialect, kinks=convention)
        expected = kink.choice(convention) if convention == "torch" else kink.ours
        expect(gradients(made, kink, "numpy", np.float64), kink, expected)


@pytest.mark.torch
@pytest.mark.parametrize(("function", "question", "kink"), FOLLOWED, ids=[name for name, _, _ in FOLLOWED])
def test_torch_has_what_is_followed(function: str, question: str, kink: KinkRow) -> None:
    torch = pytest.importorskip("torch")
    assert kink.torch is not None
    inputs = [torch.from_numpy(x).requires_grad_(True) for x in case(kink).feeds.values()]
    asked(torch, question, inputs).sum().backward()
    for tensor, expected in zip(inputs, kink.torch, strict=True):
        if expected is not None:
            given = np.zeros(tensor.shape) if tensor.grad is None else tensor.grad.numpy()
            np.testing.assert_allclose(given, np.array(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "output", "flat"),
    [
        ("node_relu6", "y", True),
        ("n4", "hardtanh", True),
        ("n4", "relu6_2", True),
        ("/features/relu6/Clip_1", "y", True),
        ("node_clamp", "clamp", False),
        ("relu6_head", "my_relu6_out", False),
        ("", "y", False),
    ],
)
def test_a_name_tells_where_there_are_no_metadata(name: str, output: str, flat: bool) -> None:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[4] x) => (float[4] {output}) <float a = {{0}}, float b = {{6}}>'
        f" {{ {output} = Clip(x, a, b) }}"
    )
    model.graph.node[0].name = name
    x = np.array([0, 6, 3, 7], np.float32)
    for convention in ("torch", "refgrad"):
        made = refgrad.gradient(model, ["x"], cotangent="ones", kinks=convention)
        got = get_backend("numpy").prepare(made).run({"x": x})["x_grad"]
        ends = 0 if flat and convention == "torch" else 1
        np.testing.assert_array_equal(got, [ends, ends, 1, 0])


def test_a_second_derivative_follows_too() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[3] x) => (float[3] y) <float a = {0}, float b = {6}>'
        " { relu6 = Clip(x, a, b)  y = Mul(relu6, relu6) }"
    )
    product = refgrad.hvp(model, ["x"], kinks="torch")
    x = np.array([0, 6, 3], np.float32)
    got = get_backend("numpy").prepare(product).run({"x": x, "x_vector": np.ones(3, np.float32)})
    np.testing.assert_array_equal(got["x_hvp"], [0, 0, 2])


@pytest.mark.parametrize("convention", ["torch", "refgrad"])
@pytest.mark.parametrize(("axis", "keepdims"), [(1, 1), (-1, 1), (1, 0), (0, 1)])
def test_an_index_beside_it_tells_a_maximum_by_index(axis: int, keepdims: int, convention: str) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2,3] x) => (float[M,N] y, int64[M,N] i) <int64[1] a = {1}>'
        f" {{ y = ReduceMax<keepdims=1>(x, a)  i = ArgMax<axis={axis}, keepdims={keepdims}>(x) }}"
    )
    if not keepdims:
        del model.graph.output[1]
    made = refgrad.gradient(model, ["x"], ["y"], cotangent="ones", kinks=convention)
    got = get_backend("numpy").prepare(made).run({"x": np.array([[1, 1, 0], [2, 3, 3]], np.float32)})["x_grad"]
    follows = convention == "torch" and axis != 0 and keepdims == 1
    np.testing.assert_array_equal(got, [[1, 0, 0], [0, 1, 0]] if follows else [[0.5, 0.5, 0], [0, 0.5, 0.5]])


TIES = ((1.0, 1.0, 0.0, -1.0), (2.0, 3.0, 3.0, 3.0))
ENDS = ((-1.0, 1.0, 0.5, 0.0), (-2.0, 2.0, 1.0, -1.0))
SIX = ((-1.0, 0.0, 6.0, 7.0), (3.0, 0.0, 6.0, 2.0))
SIGNS = ((-1.0, 0.0, 1.0, 0.0), (2.0, 2.0, -3.0, -3.0))
NOTHING = ((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))
EXPORTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("nn.functional.relu6(x)", (SIX,)),
    ("nn.ReLU6()(x)", (SIX,)),
    ("nn.functional.hardtanh(x)", (ENDS,)),
    ("nn.Hardtanh(-2.0, 2.0)(x)", (ENDS,)),
    ("nn.functional.hardtanh(x, 0.0, 6.0)", (SIX,)),
    ("clamp(x, 0.0, 6.0)", (SIX,)),
    ("clamp(x, min=0.0)", (SIGNS,)),
    ("clamp_max(x, 0.0)", (SIGNS,)),
    ("clamp(x, y, z)", (ENDS, -1.0, 1.0)),
    ("clamp(x, min=y)", (ENDS, -1.0)),
    ("clamp(x, max=y)", (ENDS, 1.0)),
    ("max(x, 1).values", (TIES,)),
    ("min(x, 0).values", (((1.0, 2.0), (1.0, 3.0)),)),
    ("max(x, 1, keepdim=True)[0]", (TIES,)),
    ("max(x)", (TIES,)),
    ("amax(x, 1)", (TIES,)),
    ("maximum(x, y)", (TIES, TIES)),
    ("nn.AdaptiveMaxPool1d(1)(x)", (TIES,)),
    ("nn.AdaptiveMaxPool2d(1)(x[None])", (TIES,)),
    ("nn.functional.max_pool1d(x[None], 2)", (TIES,)),
    ("sort(x, 1).values * z", (TIES, 0.0, (1.0, 2.0, 3.0, 4.0))),
    ("linalg.vector_norm(x, 3)", (NOTHING,)),
    ("linalg.vector_norm(x, 0.5)", (SIGNS,)),
    ("linalg.vector_norm(x, 1, dim=1)", (SIGNS,)),
    ("linalg.vector_norm(x, dim=1)", (NOTHING,)),
    ("linalg.vector_norm(x, 1e999, dim=1)", (TIES,)),
    ("nn.functional.hardswish(x)", ((-3.0, 3.0, 0.0),)),
    ("nn.functional.hardsigmoid(x)", ((-3.0, 3.0, 0.0),)),
    ("nn.functional.softshrink(x, 1.0)", (ENDS,)),
    ("nn.functional.hardshrink(x, 1.0)", (ENDS,)),
    ("nn.functional.threshold(x, 1.0, 0.0)", (ENDS,)),
    ("nn.functional.leaky_relu(x, 0.1)", (SIGNS,)),
    ("nn.functional.celu(x, 0.5)", (SIGNS,)),
    ("nn.functional.l1_loss(x, y)", (SIGNS, SIGNS)),
    ("nn.functional.smooth_l1_loss(x, y)", (ENDS, NOTHING)),
    ("nn.functional.huber_loss(x, y)", (ENDS, NOTHING)),
    ("fmod(x, y)", ((2.0, 3.0, -2.0), (1.0, 2.0, 1.0))),
    ("logsumexp(x, 1)", (((0.0, float("-inf")), (float("-inf"), float("-inf"))),)),
)


@pytest.mark.torch
@pytest.mark.parametrize(("question", "values"), EXPORTED, ids=[question for question, _ in EXPORTED])
def test_an_export_has_the_derivatives_of_its_function(question: str, values: tuple[Any, ...]) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Asked(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            layer = question.partition(")(")[0] + ")" if question.startswith("nn.") and ")(" in question else ""
            self.layer = asked(torch, layer, []) if layer else None

        def forward(self, *inputs: Any) -> Any:
            if self.layer is not None:
                return self.layer(asked(torch, question.partition(")(")[2].removesuffix(")"), list(inputs)))
            return asked(torch, question, list(inputs))

    layer, inputs = Asked().eval(), [torch.tensor(value) for value in values]
    leaves = [tensor.clone().requires_grad_(True) for tensor in inputs]
    expected = torch.autograd.grad(layer(*leaves).sum(), leaves, allow_unused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own
        program = torch.onnx.export(layer, tuple(inputs), dynamo=True, verbose=False)
    assert program is not None
    model = program.model_proto
    made = refgrad.gradient(model, [v.name for v in model.graph.input], cotangent="ones", kinks="torch")
    fed = {value.name: tensor.numpy() for value, tensor in zip(model.graph.input, inputs, strict=True)}
    for got, slope in zip(get_backend("numpy").prepare(made).run(fed).values(), expected, strict=True):
        np.testing.assert_allclose(got, np.zeros_like(got) if slope is None else slope.numpy(), rtol=1e-4)

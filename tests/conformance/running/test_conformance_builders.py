"""Builders and executors: what they make is compared with differences, and every way in which they refuse has its message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto

from refgrad.backends import available
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.oracles import Built, Directional, get_oracle
from refgrad.conformance.problems.problem import Problem, ask
from refgrad.conformance.problems.systems.builders import BUILDERS, build, get_builder, version
from refgrad.conformance.problems.systems.executors import executors, get_executor, run
from refgrad.conformance.problems.systems.executors import version as version_of_executor
from refgrad.conformance.problems.systems.training_form import as_it_trains
from refgrad.errors import AnswerError, BackendError, BuilderError, FeedError, OptionError

INSTALLED = [name for name, builder in BUILDERS.items() if not builder.missing()]
TRAINING = "onnxruntime:raw" in INSTALLED
NEEDS_TRAINING = ("refgrad:ort", "onnxruntime:raw", "onnxruntime:module")  # their gradients run on training kernels


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def parsed(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


DENSE = parsed(
    """dense (float[2, 3] x) => (float[2, 2] y, float s) <float[3, 2] w = {0.1, 0.2, -0.3, 0.4, 0.5, -0.6}>
    { [product] p = MatMul(x, w) [squash] y = Tanh(p) [sum] s = ReduceSum<keepdims=0>(y) }"""
)
CASES = {
    case.name: case
    for case in (
        Case("two outputs, a weight", DENSE, {"x": draw(2, 3)}, ("x", "w")),
        Case("the second output alone", DENSE, {"x": draw(2, 3)}, ("w",), ("s",)),
        Case(
            "an input that nothing depends on",
            parsed("f (float[3] x, float[2] z) => (float[3] y) { [n] y = Exp(x) }"),
            {"x": draw(3), "z": draw(2)},
        ),
        Case(
            "a weight that is an input too",
            parsed("f (float[3] x, float[3] w) => (float[3] y) <float[3] w = {1, 2, 3}> { [n] y = Mul(x, w) }"),
            {"x": draw(3)},
            ("x", "w"),
        ),
        Case(
            "inputs and outputs in another order",
            parsed("f (float[3] a, float[3] b) => (float[3] y, float[3] z) { y = Mul(a, b) z = Sub(a, y) }"),
            {"a": draw(3), "b": 2 * draw(3)},
            ("b", "a"),
            ("z", "y"),
        ),
        node_case("Add", draw(2, 3), draw(3), opset=21),
        node_case("Sigmoid", draw(2, 3), opset=21, shapes="symbolic"),
        node_case("ReduceSum", draw(2, 3), np.array([1]), constant=["axes"], keepdims=0, opset=21),
    )
}


def is_right(problem: Problem, builder: str, executor: str) -> bool:
    """True if differences along random directions say so, in the model's own types."""
    built = build(builder, problem)
    results = run(executor, built.model, built.feeds(problem.feeds, problem.cotangents))
    observe = get_oracle("differences").observe
    assert observe is not None
    for said in observe(problem):
        assert isinstance(said, Directional)
        expected = problem.at[said.name]
        gradient = results[built.gradients[said.name]] if said.name in built.gradients else np.zeros(expected.shape)
        assert gradient.shape == expected.shape
        got = float(np.sum(gradient.astype(np.float64) * said.direction))
        size = float(np.sum(np.abs(gradient * said.direction)))
        if abs(got - said.value) > 1e-5 * max(size, abs(said.value)) + said.error:
            return False
    return True


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("builder", INSTALLED)
def test_every_builder_differentiates(builder: str, name: str) -> None:
    executor = "ort-cpu" if builder in NEEDS_TRAINING and TRAINING else "numpy"
    assert is_right(ask(CASES[name]), builder, executor)


@pytest.mark.skipif("onnx-ad" not in INSTALLED, reason="needs onnx-ad")
def test_onnx_ad_gets_an_axis_by_attribute_before_opset_13() -> None:
    text = '<ir_version: 8, opset_import: ["": 12]> f (float[2, 3] x) => (float[2, 3] y) { y = Tanh(x) }'
    assert is_right(ask(Case("opset 12", onnx.parser.parse_model(text), {"x": draw(2, 3)})), "onnx-ad", "numpy")


def test_a_gradient_is_fed_what_it_takes_and_nothing_else() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> f (float[2] x, float[2] v, float c) => (float[2] g) { g = Sum(x, v, c) }'
    )
    built = Built(model, {"y": "v", "z": "w"}, {"x": "g"}, {"c": np.float32(1)})
    x, y, z = (draw(2) for _ in range(3))
    assert built.feeds({"x": x, "unused": x}, {"y": y, "z": z}) == {"x": x, "v": y, "c": np.float32(1)}
    assert built.named({"g": y}) == {"x": y}


def test_a_gradient_of_refgrad_says_its_names_and_no_other_model_does() -> None:
    made = build("refgrad", ask(CASES["two outputs, a weight"]))
    assert Built.of(made.model) == made
    bare = Built.of(CASES["two outputs, a weight"].model)
    assert not bare.cotangents
    assert not bare.gradients


# A function of one's own

FUNCTIONS = """
import onnx.parser
import refgrad

def right(model, wrt, outputs):
    return refgrad.gradient(model, wrt, outputs)

def twice(model, wrt, outputs):
    return onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
        f (float[2, 3] X, float[2, 3] Y_grad) => (float[2, 3] X_grad)
        { y = Sigmoid(X) one = Constant<value_float = 2.0>() c = Sub(one, y) d = Mul(y, c) X_grad = Mul(d, Y_grad) }''')

def refuses(model, wrt, outputs):
    raise NotImplementedError("Sigmoid is not for me")

def nothing(model, wrt, outputs):
    return None

def no_gradient(model, wrt, outputs):
    return onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
        f (float[2, 3] X, float[2, 3] Y_grad) => (float[2, 3] dX) { dX = Mul(X, Y_grad) }''')

def no_cotangent(model, wrt, outputs):
    return onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
        f (float[2, 3] X) => (float[2, 3] X_grad) { X_grad = Exp(X) }''')

def another_cotangent(model, wrt, outputs):
    return onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
        f (float[2, 3] X, float[2, 3] dY) => (float[2, 3] X_grad) { X_grad = Mul(X, dY) }''')

def spoils(model, wrt, outputs):
    made = refgrad.gradient(model, wrt, outputs)
    model.Clear()
    wrt.clear()
    outputs.clear()
    return made

def invalid(model, wrt, outputs):
    return onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
        f (float[2, 3] X, float[2, 3] Y_grad) => (float[2, 3] X_grad) { X_grad = Mul(X, missing) }''')

number = 3
"""


@pytest.fixture
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the current folder."""
    (tmp_path / "brought_builders.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "brought_builders"
    sys.modules.pop("brought_builders", None)


SIGMOID = CASES[node_case("Sigmoid", draw(2, 3), opset=21, shapes="symbolic").name]


def test_a_function_of_the_current_folder_is_a_builder(brought: str) -> None:
    assert is_right(ask(SIGMOID), f"{brought}:right", "numpy")
    assert version(f"{brought}:right") == ""


def test_a_wrong_function_is_noticed(brought: str) -> None:
    assert not is_right(ask(SIGMOID), f"{brought}:twice", "numpy")


def test_a_function_that_raises_refuses_with_its_own_words(brought: str) -> None:
    with pytest.raises(NotImplementedError, match="Sigmoid is not for me"):
        build(f"{brought}:refuses", ask(SIGMOID))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing", "it returned None instead of a ModelProto"),
        ("no_gradient", "its model has no gradient 'X_grad'; 'dX' are its outputs"),
        ("another_cotangent", "its model takes 'dY'; it may take 'X', 'Y_grad'"),
        ("invalid", "its model is invalid: .*missing"),
    ],
)
def test_what_is_no_gradient_is_no_answer(brought: str, function: str, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        build(f"{brought}:{function}", ask(SIGMOID))


def test_a_cotangent_that_makes_no_difference_need_not_be_taken(brought: str) -> None:
    built = build(f"{brought}:no_cotangent", ask(SIGMOID))
    assert built.cotangents == {}
    assert list(built.gradients) == ["X"]


def test_a_function_may_spoil_what_it_was_given(brought: str) -> None:
    assert is_right(ask(SIGMOID), f"{brought}:spoils", "numpy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "refgard",
            r"There is no builder 'refgard'\. Did you mean 'refgrad'\? There are 'refgrad', .* package\.module:function",
        ),
        ("onnxruntime:rw", r"cannot be imported: .* Did you mean 'onnxruntime:raw'\? Give package\.module:name"),
        ("brought_builders:absent", "cannot be imported: AttributeError: .* 'absent'"),
        ("brought_builders:number", r"is an int\. Give function\(model, wrt, outputs\) -> ModelProto"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError: .* that is installed or lies in "),
    ],
)
def test_a_name_that_is_no_builder(brought: str, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        get_builder(name)


@pytest.mark.skipif(TRAINING, reason="needs an onnxruntime without builders")
@pytest.mark.parametrize("builder", ["onnxruntime:raw", "onnxruntime:module"])
def test_a_builder_that_is_missing_says_what_to_install(builder: str) -> None:
    with pytest.raises(BuilderError, match=r"onnxruntime-training-cpu==1\.19\.2") as raised:
        build(builder, ask(SIGMOID))
    assert raised.value.verdict == "missing"


@pytest.mark.skipif(not TRAINING, reason="needs onnxruntime-training")
class TestOnnxRuntime:
    def test_its_refusal_is_in_its_own_words(self) -> None:
        with pytest.raises(BuilderError, match=r"gradient builder has not been registered: Softplus") as raised:
            build("onnxruntime:raw", ask(node_case("Softplus", draw(2), opset=21)))
        assert raised.value.verdict == "refused"

    @pytest.mark.parametrize("builder", ["onnxruntime:raw", "onnxruntime:module"])
    def test_no_output_depends_on_it(self, builder: str) -> None:
        problem = ask(
            Case("apart", CASES["an input that nothing depends on"].model, {"x": draw(3), "z": draw(2)}, ("z",))
        )
        with pytest.raises(BuilderError, match="no output depends on 'z'"):
            build(builder, problem)

    def test_inference_stays_inference(self) -> None:
        """Its module builder normalizes by the batch there too: another function."""
        case = node_case(
            "BatchNormalization", draw(2, 3, 4), draw(3), draw(3), draw(3), np.abs(draw(3)), opset=21, wrt=["X"]
        )
        with pytest.raises(BuilderError, match="BatchNormalization"):
            build("onnxruntime:raw", ask(case))

    @pytest.mark.parametrize("builder", ["onnxruntime:raw", "onnxruntime:module"])
    def test_a_known_fault_is_noticed(self, builder: str) -> None:
        """Its gradient of ScatterND looks at no reduction."""
        data, updates = draw(4, 3), draw(2, 3)
        case = node_case("ScatterND", data, np.array([[0], [2]]), updates, opset=18, reduction="max")
        assert not is_right(ask(case), builder, "ort-cpu")

    def test_versions(self) -> None:
        assert version("onnxruntime:raw") == version_of_executor("ort-cpu") == "onnxruntime-training-cpu 1.19.2"


# Executors


@pytest.mark.parametrize("executor", [name for name, why in executors().items() if why is None])
def test_every_executor_runs(executor: str) -> None:
    x = draw(2, 3)
    assert list(run(executor, DENSE, {"x": x}, ["s"])) == ["s"]
    expected = np.tanh(x.astype(np.float64) @ np.array([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6]]))
    np.testing.assert_allclose(run(executor, DENSE, {"x": x})["y"], expected, rtol=1e-5)


def test_executors_are_the_backends_and_the_reference() -> None:
    assert set(executors()) >= {"numpy", "ort-cpu", "ort-cuda", "onnx.reference"}


def test_versions() -> None:
    assert version_of_executor("onnx.reference") == f"onnx {onnx.__version__}"
    assert version("refgrad") == version_of_executor("numpy")
    assert version("refgrad").startswith("refgrad ")
    assert version("onnx.parser:parse_model") == f"onnx {onnx.__version__}"


def test_the_reference_says_what_it_cannot() -> None:
    unknown = parsed("f (float[3] x) => (float[3] y) { y = Exp(x) }")
    unknown.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(BackendError, match=r"onnx\.reference does not read the model: .*NoSuchOperator"):
        run("onnx.reference", unknown, {"x": draw(3)})
    mismatched = parsed("f (float[N] x, float[M] z) => (float[K] y) { y = Add(x, z) }")
    with pytest.raises(BackendError, match=r"onnx\.reference fails on the model: TypeError"):
        run("onnx.reference", mismatched, {"x": draw(3), "z": draw(2)})
    with pytest.raises(FeedError, match="have 'X', but the model has no such input"):
        run("onnx.reference", mismatched, {"X": draw(3)})
    with pytest.raises(OptionError, match=r"'onnx\.reference' has no option 'threads'"):
        get_executor("onnx.reference").prepare(mismatched, threads=1)


EXECUTORS = """
from refgrad.backends.numpy import NumpyBackend

class OnnxBackend:
    def prepare(model, device):
        raise RuntimeError("out of order")

instance = NumpyBackend()
number = 3
"""


@pytest.fixture
def executor_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "brought_executors.py").write_text(EXECUTORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "brought_executors"
    sys.modules.pop("brought_executors", None)


@pytest.mark.parametrize("attribute", ["NumpyBackend", "instance"])
def test_an_executor_of_ones_own(executor_module: str, attribute: str) -> None:
    assert run(f"{executor_module}:{attribute}", DENSE, {"x": draw(2, 3)})["y"].shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "brought_executors:OnnxBackend",
            RuntimeError,
            "out of order",
        ),
        ("brought_executors:number", BackendError, r"brought_executors:number has no method prepare\(model, device\)"),
        ("onnx.referenc", OptionError, r"There is no executor .* Did you mean 'onnx\.reference'\?"),
        ("brought_executors:absent", OptionError, "cannot be imported: AttributeError"),
    ],
)
def test_a_name_that_is_no_executor(executor_module: str, name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(name, DENSE, {"x": draw(2, 3)})


@pytest.mark.skipif("ort-cuda" in available(), reason="needs a machine without CUDA")
def test_an_executor_that_cannot_be_used_says_why() -> None:
    with pytest.raises(BackendError, match="'ort-cuda' cannot be used here: "):
        run("ort-cuda", DENSE, {"x": draw(2, 3)})


@pytest.mark.parametrize("layout", [0, 1])
def test_the_training_form_of_a_recurrent_operator_keeps_no_default_layout(layout: int) -> None:
    """LSTMTraining has no attribute layout: exporters write 0, and the builder would refuse the name."""
    model = parsed(
        f"""f (float[2, 1, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[a, b, c, d] y)
        {{ y = LSTM <hidden_size = 4, layout = {layout}> (x, w, r) }}"""
    )
    [node] = as_it_trains(model).graph.node
    assert node.op_type == "LSTMTraining"
    assert [attribute.name for attribute in node.attribute] == ["hidden_size", "layout"][: 1 + layout]

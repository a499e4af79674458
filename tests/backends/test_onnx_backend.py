"""onnx's own backend tests: all pass on the interpreter but those in a table, each of which is held to its reason."""

from __future__ import annotations

import importlib
import re
import unittest
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.base
import pytest
from onnx import helper, parser
from onnx_tests import collected, loaded, names

from refgrad.backends import onnx_backend
from refgrad.backends.numpy import registry
from refgrad.backends.onnx_backend import OnnxBackend
from refgrad.conformance.tools.exporting import backendtests
from refgrad.conformance.tools.exporting.backendtests import KINDS, LEFT_OUT, RANDOM, backend_tests
from refgrad.errors import BackendError, FeedError, OptionError

pytestmark = pytest.mark.interpreter

PAGE = (Path(__file__).parents[2] / "docs" / "executors.md").read_text()

TESTS = [(kind, name) for kind, found in names()["backend"].items() for name in found]
JUDGED = [key for key in TESTS if key[1] not in LEFT_OUT]

ADD = """<ir_version: 8, opset_import: ["" : 17]>
    add (float[2] x, float[2] y, float[2] w) => (float[2] z, float[2] s)
    <float[2] w = {1, 2}> { s = Add(x, y) z = Mul(s, w) }"""


@pytest.mark.parametrize(("kind", "name"), JUDGED)
def test_passes(kind: str, name: str) -> None:
    try:
        backend_tests()[kind][name]()
    except unittest.SkipTest as reason:
        pytest.fail(f"not run: {reason}")


@pytest.mark.parametrize("name", sorted(LEFT_OUT.keys() - RANDOM))
def test_what_is_left_out_would_fail(name: str) -> None:
    """Once it passes, the reason no longer holds."""
    [run] = [tests[name] for tests in backend_tests().values() if name in tests]
    with pytest.raises((AssertionError, BackendError, unittest.SkipTest)):
        run()


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_numbers_are_of_the_right_kind(name: str) -> None:
    test = loaded()[name]
    for inputs, expected in test.data_sets:
        [got] = onnx_backend.run_model(test.model, inputs)
        assert (got.shape, got.dtype) == (expected[0].shape, expected[0].dtype)
        assert set(got.ravel()) <= {0, 1}


def test_float16_of_the_test_that_is_left_out_is_no_less_exact() -> None:
    name = "test_attention_4d_causal_fp16_expanded"
    test = loaded()[name]
    [(inputs, [expected])] = test.data_sets
    [exact] = onnx_backend.run_model(test.model, inputs, precision="float64")
    [got] = onnx_backend.run_model(test.model, inputs)
    assert np.abs(got - exact).max() <= np.abs(expected - exact).max()


def test_the_names_are_those_of_onnx() -> None:
    assert names() == collected(), "python tests/helpers/onnx_tests.py writes them anew"


def test_the_numbers() -> None:
    for kind in KINDS:
        every = [name for of, name in TESTS if of == kind]
        left_out = LEFT_OUT.keys() & set(every)
        print(f"{kind}: {len(every) - len(left_out)} passed, {len(left_out)} left out, {len(every)} in all")
    assert len(LEFT_OUT.keys() - {name for _, name in TESTS}) == 0
    if onnx.__version__ == "1.23.2":
        assert [len(backend_tests()[kind]) for kind in KINDS] == [1884, 23, 82, 35]


@pytest.mark.parametrize(
    ("operator", "name", "planted"),
    [
        ("Floor", "test_floor", lambda X: np.ceil(X)),
        ("Floor", "test_floor", lambda X: np.floor(X).astype(np.float64)),
        ("Floor", "test_floor", lambda X: np.floor(X)[..., None]),
        ("SequenceConstruct", "test_if_seq", lambda *inputs: ([x + 1 for x in inputs],)),
        ("SequenceConstruct", "test_if_seq", lambda *inputs: ([*inputs, *inputs],)),
    ],
)
def test_a_wrong_kernel_is_caught(
    operator: str, name: str, planted: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_tests()["node"][name]()
    monkeypatch.setitem(registry._all(), ("", operator), [])
    registry.kernel(operator)(planted)
    with pytest.raises(AssertionError):
        backend_tests()["node"][name]()


def test_a_test_that_is_not_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxBackend, "is_compatible", lambda *_: False)
    with pytest.raises(unittest.SkipTest):
        backend_tests()["simple"]["test_sign_model"]()


def test_pictures_are_left_out_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backendtests, "_NO_PILLOW", True)
    pictures = {name for name, reason in backendtests._left_out().items() if "Pillow" in reason}
    assert pictures == {name for _, name in TESTS if name.startswith("test_image_decoder")}


# The adapter itself


def test_is_a_backend_of_onnx() -> None:
    assert issubclass(onnx_backend.OnnxBackend, onnx.backend.base.Backend)
    prepared = onnx_backend.prepare(parser.parse_model(ADD))
    assert isinstance(prepared, onnx.backend.base.BackendRep)
    x = np.float32([1, 2])
    for inputs, expected in (([x, x], [2, 8]), ([x, x, x], [2, 8])):
        outputs = prepared.run(inputs)
        assert isinstance(outputs, tuple)
        np.testing.assert_array_equal(outputs[0], expected)
    np.testing.assert_array_equal(onnx_backend.run_model(parser.parse_model(ADD), [x, x])[1], [2, 4])


def test_runs_on_the_cpu_alone() -> None:
    assert onnx_backend.supports_device("CPU")
    assert not onnx_backend.supports_device("CUDA")
    with pytest.raises(BackendError, match="runs on 'CPU', not on 'CUDA'"):
        onnx_backend.prepare(parser.parse_model(ADD), "CUDA")


def test_says_what_it_can_run() -> None:
    assert onnx_backend.is_compatible(parser.parse_model(ADD))
    assert not onnx_backend.is_compatible(parser.parse_model(ADD), "CUDA")
    strange = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "x" : 1]> g (float a) => (float b) { b = x.F(a) }'
    )
    assert not onnx_backend.is_compatible(strange)


def test_takes_the_options_of_the_interpreter_and_no_others() -> None:
    [z, _] = onnx_backend.run_model(parser.parse_model(ADD), [np.ones(2), np.ones(2)], precision="float64", rtol=1e-3)
    assert z.dtype == np.float64
    with pytest.raises(OptionError, match="has no option"):
        onnx_backend.prepare(parser.parse_model(ADD), speed=11)


def test_counts_the_inputs() -> None:
    with pytest.raises(FeedError, match=r"2 inputs without a default: \['x', 'y'\]. 1 are given"):
        onnx_backend.run_model(parser.parse_model(ADD), [np.ones(2, np.float32)])
    with pytest.raises(FeedError, match=r"inputs \['a'\]. 2 are given"):
        onnx_backend.run_node(helper.make_node("Neg", ["a"], ["b"]), [np.ones(1), np.ones(1)])


NODES = [
    (helper.make_node("Add", ["a", "a"], ["b"]), [np.ones(2), np.ones(2)], {}, [2.0, 2.0]),
    (helper.make_node("Clip", ["a", "", "b"], ["c"]), [np.array([1.0, 3.0]), np.array(2.0)], {}, [1.0, 2.0]),
    (helper.make_node("SequenceAt", ["a", "b"], ["c"]), [[np.ones(1), np.zeros(2)], np.array(1)], {}, [0.0, 0.0]),
    (helper.make_node("StringConcat", ["a", "b"], ["c"]), [np.array(["x"]), np.array("y")], {}, ["xy"]),
    (helper.make_node("Softmax", ["a"], ["b"], axis=0), [np.zeros((2, 2))], {"opset_version": 11}, [[0.25] * 2] * 2),
    (helper.make_node("Binarizer", ["a"], ["b"], domain="ai.onnx.ml"), [np.array([-1.0, 2.0])], {}, [0.0, 1.0]),
    (
        helper.make_node("ReluGrad", ["a", "b"], ["c"], domain="com.microsoft"),
        [np.array([3.0, 3.0]), np.array([-1.0, 1.0])],
        {"outputs_info": [(np.float64, (2,))]},
        [0.0, 3.0],
    ),
]


@pytest.mark.parametrize(("node", "inputs", "options", "expected"), NODES, ids=lambda x: getattr(x, "op_type", ""))
def test_runs_a_node(node, inputs, options, expected) -> None:
    [got] = onnx_backend.run_node(node, inputs, **options)
    np.testing.assert_array_equal(got, np.array(expected, got.dtype))


def test_the_docs_name_the_module_and_its_class() -> None:
    [name] = re.findall(r"ONNX_BACKEND_MODULE=([\w.]+)", PAGE)
    module = importlib.import_module(name)
    for function in ("prepare", "run_model", "run_node", "is_compatible", "supports_device"):
        assert callable(getattr(module, function))
    [title] = re.findall(r"BackendTest\(([\w.]+)\)", PAGE)
    assert getattr(module, title.rpartition(".")[2]) is onnx_backend.OnnxBackend

"""The interface of the executors: discovery, preparation, feeds and their messages."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.base
import pytest
from onnx import parser

from refgrad.backends import Backend, available, backends, get_backend, wrap
from refgrad.backends.discovery import BUILT_IN, GROUP, _targets
from refgrad.errors import BackendError, FeedError, InvalidModelError, OptionError

ADD = """<ir_version: 8, opset_import: ["" : 17]>
    add (float[N, 3] x, float[N, 3] y, float[3] bias) => (float[N, 3] z, float[N, 3] s)
    <float[3] bias = {1, 2, 3}> { s = Add(x, y) z = Add(s, bias) }"""

RUNNABLE = [name for name in BUILT_IN if name in available()]


@pytest.fixture(params=RUNNABLE)
def backend(request) -> Backend:
    return get_backend(request.param)


@pytest.fixture
def model() -> onnx.ModelProto:
    return parser.parse_model(ADD)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_the_numpy_backend_is_always_there():
    assert "numpy" in available()
    assert set(backends()) >= set(BUILT_IN)
    assert get_backend("numpy").name == "numpy"


def test_what_cannot_be_used_has_a_reason():
    for name, reason in backends().items():
        assert reason is None or isinstance(reason, str)
        if reason is not None:
            with pytest.raises(BackendError, match=f"{name}.*cannot be used here"):
                get_backend(name)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(BackendError, match=r"no executor 'nump'.*Did you mean 'numpy'.*'ort-cpu'"):
        get_backend("nump")


def test_importing_the_package_imports_no_runtime():
    code = "import refgrad.backends, sys; sys.exit('onnxruntime' in sys.modules or 'onnx.reference' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_backend_imports_nothing_of_the_differentiator():
    folder = Path(__file__).parents[2] / "backends"
    lines = [line for file in folder.rglob("*.py") for line in file.read_text().splitlines()]
    names = {name for line in lines for name in re.findall(r"^\s*(?:from|import) (refgrad[\w.]*)", line)}
    assert {name for name in names if not name.startswith("refgrad.backends")} == {
        "refgrad.errors",
        "refgrad.links",
        "refgrad.model",
        "refgrad.protos.domains",
        "refgrad.protos.types",
        "refgrad.protos.metadata",
        "refgrad.model.external",
        "refgrad.model.checks.recursion",
        "refgrad.model.inlining.inline",
        "refgrad.model.checks.malformed",
        "refgrad.protos.memory",
        "refgrad.protos.messages",
        "refgrad.model.places",
        "refgrad.model.reading",
        "refgrad.protos.traverse",
        "refgrad.sizes",
        "refgrad.tables",
        "refgrad.tables.definitions",
        "refgrad.tables.families",
        "refgrad.tables.once",
        "refgrad.tables.randomness",
        "refgrad.tables.schemas",
        "refgrad.tables.signatures",
    }


def test_description_is_one_line(backend):
    assert backend.description()
    assert "\n" not in backend.description()


def test_runs_and_keeps_the_model(backend, model):
    before = model.SerializeToString()
    result = backend.prepare(model).run({"x": ones(2, 3), "y": ones(2, 3)})
    assert list(result) == ["z", "s"]
    np.testing.assert_array_equal(result["z"], np.float32([[3, 4, 5]] * 2))
    assert model.SerializeToString() == before


def test_describes_inputs_and_outputs(backend, model):
    prepared = backend.prepare(model)
    assert [str(value) for value in prepared.inputs] == ["x: float32[N, 3]", "y: float32[N, 3]", "bias: float32[3]"]
    assert [value.has_default for value in prepared.inputs] == [False, False, True]
    assert [value.name for value in prepared.outputs] == ["z", "s"]
    assert prepared.inputs[0].shape == ("N", 3)


def test_a_default_can_be_overridden(backend, model):
    result = backend.prepare(model).run({"x": ones(1, 3), "y": ones(1, 3), "bias": ones(3)}, outputs=["z"])
    assert list(result) == ["z"]
    np.testing.assert_array_equal(result["z"], np.full((1, 3), 3, np.float32))


def test_runs_a_model_by_path_with_external_data(backend, tmp_path):
    values = np.arange(2000, dtype=np.float32)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [2000])],
        [onnx.helper.make_tensor_value_info("y", 1, [2000])],
        [onnx.numpy_helper.from_array(values, "w")],
    )
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0)
    np.testing.assert_array_equal(backend.prepare(path).run({"x": values})["y"], 2 * values)
    np.testing.assert_array_equal(backend.prepare(str(path)).run({"x": values})["y"], 2 * values)


def test_zero_dimensional_and_empty_feeds(backend):
    scalar = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { y = Neg(x) }')
    result = backend.prepare(scalar).run({"x": np.float32(2)})["y"]
    assert result.shape == ()
    assert result == -2
    empty = backend.prepare(parser.parse_model(ADD)).run({"x": ones(0, 3), "y": ones(0, 3)})
    assert empty["z"].shape == (0, 3)


def test_float16_goes_through(backend):
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float16[3] x) => (float16[3] y) { y = Neg(x) }'
    x = np.float16([1, 2, 3])
    result = backend.prepare(parser.parse_model(text)).run({"x": x})["y"]
    assert result.dtype == np.float16
    np.testing.assert_array_equal(result, -x)


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"x": ones(2, 3)}, r"No feed for y: float32\[N, 3\]. Add it"),
        (
            {"x": ones(2, 3), "y": ones(2, 3), "bais": ones(3)},
            "have 'bais', but the model .* Did you mean 'bias'.*'x', 'y', 'bias'",
        ),
        (
            {"x": ones(2, 3).astype(float), "y": ones(2, 3)},
            r"'x' has dtype float32, the feed float64.*\.astype\('float32'\)",
        ),
        ({"x": ones(2, 3), "y": [[1, 2, 3]]}, "'y' has dtype float32, the feed int64"),
        ({"x": ones(2, 3), "y": [[1, 2], [3]]}, "feed of input 'y', a list, cannot be made an array"),
        ({"x": ones(3), "y": ones(2, 3)}, r"rank 2, the feed has shape \(3,\) of rank 1"),
        ({"x": ones(2, 4), "y": ones(2, 3)}, r"3 elements on axis 1, the feed has shape \(2, 4\)"),
        ({"x": ones(2, 3), "y": ones(1, 3)}, "'N' is 2 on axis 0 of 'x' and 1 on axis 0 of 'y'"),
    ],
)
def test_wrong_feeds_are_refused(backend, model, feeds, message):
    with pytest.raises(FeedError, match=message):
        backend.prepare(model).run(feeds)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [(["q"], "no output 'q'. Its outputs are 'z', 's'"), ("z", r"is a string. Give a list of names: outputs=\['z'\]")],
)
def test_wrong_outputs_are_refused(backend, model, outputs, message):
    with pytest.raises(FeedError, match=message):
        backend.prepare(model).run({"x": ones(2, 3), "y": ones(2, 3)}, outputs=outputs)


def test_lists_of_the_right_type_are_taken(backend):
    text = '<ir_version: 8, opset_import: ["" : 17]> g (int64[2] x) => (int64[2] y) { y = Neg(x) }'
    np.testing.assert_array_equal(backend.prepare(parser.parse_model(text)).run({"x": [1, 2]})["y"], [-1, -2])


def test_a_missing_or_broken_file_is_refused(backend, tmp_path):
    with pytest.raises(InvalidModelError, match="There is no file"):
        backend.prepare(tmp_path / "nothing.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff\xff")
    with pytest.raises(InvalidModelError, match=r"broken\.onnx is not an ONNX model"):
        backend.prepare(tmp_path / "broken.onnx")


def test_an_unknown_option_is_refused(backend, model):
    with pytest.raises(OptionError, match="has no option"):
        backend.prepare(model, speed=11)


# Entry points


class Third(Backend):
    name = "third"

    def description(self) -> str:
        return "a third party's backend"

    def prepare(self, model, **options):
        return get_backend("numpy").prepare(model, **options)


NOT_A_BACKEND = "just a string"


@pytest.fixture
def entry_points(monkeypatch):
    """Sets the entry points of the group to those given as name=value."""

    def use(**points: str) -> None:
        found = [metadata.EntryPoint(name.replace("_", "-"), value, GROUP) for name, value in points.items()]
        monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == GROUP else [])
        _targets.cache_clear()

    yield use
    _targets.cache_clear()


@pytest.fixture
def third_party_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "third_party", sys.modules[__name__])


def test_without_entry_points_the_built_in_ones_are_found(entry_points):
    entry_points()
    assert list(backends()) == list(BUILT_IN)


def test_a_third_party_backend_is_found(entry_points, third_party_module, model):
    entry_points(third="third_party:Third")
    assert "third" in available()
    result = get_backend("third").prepare(model).run({"x": ones(2, 3), "y": ones(2, 3)})
    assert result["z"].shape == (2, 3)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:Backend", "loading 'no_such_module:Backend' failed with ModuleNotFoundError"),
        ("third_party:Nothing", "failed with AttributeError"),
        ("third_party:NOT_A_BACKEND", "it is a str, not a refgrad.backends.Backend"),
    ],
)
def test_a_broken_entry_point_breaks_nothing_else(entry_points, third_party_module, target, reason):
    entry_points(broken=target, third="third_party:Third")
    assert "broken" not in available()
    assert {"numpy", "third"} <= set(available())
    with pytest.raises(BackendError, match=reason):
        get_backend("broken")


# wrap


class Reference(onnx.backend.base.Backend):
    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        if kwargs.get("refuse"):
            raise NotImplementedError("not today")
        if kwargs.get("check_only"):
            return None
        from onnx.reference import ReferenceEvaluator

        class Representation:
            def run(self, inputs):
                if any(np.isnan(x).any() for x in inputs):
                    raise ValueError("NaN")
                names = [i.name for i in model.graph.input]
                return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=False)))

        return Representation()


def test_wrap_runs_any_onnx_backend(model):
    wrapped = wrap(Reference)
    assert wrapped.name == "Reference"
    assert "Reference through onnx.backend, device CPU" in wrapped.description()
    prepared = wrapped.prepare(model)
    np.testing.assert_array_equal(
        prepared.run({"x": ones(1, 3), "y": ones(1, 3)}, outputs=["z"])["z"], np.float32([[3, 4, 5]])
    )
    with pytest.raises(FeedError, match="No feed for y"):
        prepared.run({"x": ones(1, 3)})


def test_wrap_reports_what_a_backend_refuses(model):
    with pytest.raises(BackendError, match="cannot prepare the model: NotImplementedError: not today"):
        wrap(Reference).prepare(model, refuse=True)
    with pytest.raises(BackendError, match="only checks models"):
        wrap(Reference).prepare(model, check_only=True)
    with pytest.raises(BackendError, match="failed on the model: ValueError: NaN"):
        wrap(Reference).prepare(model).run({"x": ones(1, 3) * np.float32("nan"), "y": ones(1, 3)})
    with pytest.raises(BackendError, match=r"has no method prepare\(model, device\)"):
        wrap(object())


class OnnxRuntimeLike(onnx.backend.base.Backend):
    """As onnxruntime.backend: an input with a default has no position."""

    @classmethod
    def prepare(cls, model, device="CPU", **kwargs):
        from onnx.reference import ReferenceEvaluator

        tensors = {tensor.name for tensor in model.graph.initializer}
        names = [value.name for value in model.graph.input if value.name not in tensors]

        class Representation:
            def run(self, inputs):
                return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))

        return Representation()


@pytest.mark.parametrize("ir_version", [3, 8])
@pytest.mark.parametrize("backend", [Reference, OnnxRuntimeLike])
def test_wrap_feeds_by_position_and_keeps_the_defaults_of_inputs_that_are_not_fed(backend, ir_version):
    text = f"""<ir_version: {ir_version}, opset_import: ["" : 17]> g (float[1] a, float[1] b, float[1] c, float[1] d)
        => (float[1] y) <float[1] a = {{1}}, float[1] c = {{2}}> {{ s = Sub(a, b) t = Mul(s, c) y = Add(t, d) }}"""
    prepared = wrap(backend).prepare(parser.parse_model(text))
    given = {name: np.float32([value]) for name, value in (("a", 10), ("b", 3), ("c", 5), ("d", 100))}
    for fed, expected in (("bd", 96), ("abd", 114), ("bcd", 90), ("abcd", 135), ("bd", 96)):
        assert prepared.run({name: given[name] for name in fed})["y"] == [expected], fed

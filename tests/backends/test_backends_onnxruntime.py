"""The ONNX Runtime backends: what they say where the runtime refuses, and the types that it knows by number only."""

from __future__ import annotations

import importlib.util

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, parser

from refgrad.backends import available, backends, get_backend
from refgrad.backends.onnxruntime import DISTRIBUTIONS, CpuBackend, CudaBackend
from refgrad.errors import BackendError, InvalidModelError, OptionError

pytestmark = pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")


@pytest.fixture
def ort():
    return get_backend("ort-cpu")


def parse(text: str, opset: int = 17, ir: int = 8) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')


NEG = "g (float[2] x) => (float[2] y) { y = Neg(x) }"


def test_description_names_the_distribution(ort):
    import onnxruntime

    description = ort.description()
    assert onnxruntime.__version__ in description
    assert any(name in description for name in DISTRIBUTIONS)
    assert description.endswith("on CPU")


def test_cuda_is_there_or_has_a_reason():
    reason = backends()["ort-cuda"]
    if reason is None:
        result = CudaBackend().prepare(parse(NEG)).run({"x": np.ones(2, np.float32)})
        np.testing.assert_array_equal(result["y"], [-1, -1])
    else:
        assert "CUDA provider" in reason


def test_an_install_that_does_not_import_is_unavailable(monkeypatch):
    def broken(name):
        raise ImportError("libonnxruntime.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "cannot be imported (libonnxruntime.so" in (CpuBackend.unavailable() or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed (pip install onnxruntime)" in (CpuBackend.unavailable() or "")


def test_threads_can_be_limited(ort):
    result = ort.prepare(parse(NEG), threads=1).run({"x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(result["y"], [-1, -1])


def test_entries_of_the_configuration_reach_the_session(ort):
    config = {"session.intra_op.allow_spinning": "0"}
    prepared = ort.prepare(parse(NEG), config=config)
    assert prepared._session.get_session_options().get_session_config_entry(*config) == "0"
    with pytest.raises(OptionError, match=r"config=\{'a': 1\}: every name and every value must be a string"):
        ort.prepare(parse(NEG), config={"a": 1})


def test_cuda_computes_in_float32_unless_tf32_is_asked_for(monkeypatch):
    import onnxruntime

    asked = []

    def session(source, options, providers):
        asked.append(providers)
        return real(source, options, providers=["CPUExecutionProvider"])

    real = onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    CudaBackend().prepare(parse(NEG))
    CudaBackend().prepare(parse(NEG), provider_options={"use_tf32": "1", "device_id": "1"})
    first, second = ({"use_tf32": "0"}, {"use_tf32": "1", "device_id": "1"})
    assert asked == [[("CUDAExecutionProvider", chosen), "CPUExecutionProvider"] for chosen in (first, second)]
    with pytest.raises(
        OptionError, match=r"provider_options=\{'use_tf32': 1\}: every name and every value must be a string"
    ):
        CudaBackend().prepare(parse(NEG), provider_options={"use_tf32": 1})


def test_an_opset_that_is_too_new_is_explained(ort):
    with pytest.raises(
        BackendError, match=r"ort-cpu failed: .*opset.* Convert the model down with onnx.version_converter"
    ):
        ort.prepare(parse(NEG, opset=99))


def test_an_ir_that_is_too_new_is_explained(ort):
    with pytest.raises(BackendError, match=r"IR version.* Lower model.ir_version, or install a newer onnxruntime"):
        ort.prepare(parse(NEG, ir=99))


def test_a_missing_kernel_is_explained(ort):
    text = "g (float[1, 1, 4] x, float[1, 1, 4] d, float[1, 1, 1] w) => (float[1, 1, 4] y) { y = %s(d, x, w) }"
    with pytest.raises(BackendError, match=r"ConvTransposeGrad.* Use the executor 'numpy', or a model in ai.onnx"):
        ort.prepare(parse(text % "com.microsoft.ConvTransposeGrad"))


def test_a_failure_at_run_time_names_the_node(ort, capfd):
    model = parse("g (float[n] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }")
    model.graph.node[0].name = "taken"
    with pytest.raises(BackendError, match=r"Name:'taken'.*the executor 'numpy' names the first node that fails"):
        ort.prepare(model).run({"x": np.ones(2, np.float32), "i": np.array([7])})


def test_a_model_in_memory_cannot_have_external_data(ort, tmp_path):
    model = parse("g (float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(2, np.float32), "w"))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0)
    without = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    with pytest.raises(InvalidModelError, match=r"'w' lie in a file.*Give the path of the model"):
        ort.prepare(without)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_bfloat16_goes_in_and_out(ort, shape):
    dims = ", ".join(map(str, shape))
    model = parse(
        f"g (bfloat16[{dims}] x) => (bfloat16[{dims}] y, float[{dims}] z) {{ y = Identity(x) z = Cast<to = 1>(x) }}"
    )
    x = np.full(shape, 1.5, ml_dtypes.bfloat16)
    try:
        result = ort.prepare(model).run({"x": x})
    except BackendError as error:
        if "cannot be fed bfloat16" not in str(error):
            raise
        pytest.skip(str(error))
    assert result["y"].dtype == ml_dtypes.bfloat16
    assert result["y"].shape == shape
    np.testing.assert_array_equal(result["y"], x)
    np.testing.assert_array_equal(result["z"], x.astype(np.float32))


def test_bfloat16_comes_out_where_it_cannot_go_in(ort):
    model = parse("g (float[2] x) => (bfloat16[2] y) { y = Cast<to = 16>(x) }")
    result = ort.prepare(model).run({"x": np.float32([1.5, -2])})["y"]
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result.astype(np.float32), [1.5, -2])


def test_sequences_go_through(ort):
    tensor = helper.make_tensor_type_proto(1, [2])
    graph = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x", "x"], ["s"], name="pair")],
        "g",
        [helper.make_tensor_value_info("x", 1, [2])],
        [helper.make_value_info("s", helper.make_sequence_type_proto(tensor))],
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    result = ort.prepare(model).run({"x": np.ones(2, np.float32)})["s"]
    assert len(result) == 2
    np.testing.assert_array_equal(result[1], [1, 1])


@pytest.mark.parametrize("moved", ["Transpose(d)", "Reshape(d, flat)", "Unsqueeze(d, first)", "Slice(d, first, ends)"])
@pytest.mark.parametrize("zero_point", ["", ", z"])
@pytest.mark.parametrize("opset", [13, 21])
def test_numbers_of_int8_are_moved_as_they_are(ort, opset, zero_point, moved):
    """By default the passes are left out that make negative numbers 0, or a model that is not loaded."""
    model = parse(
        f"g (float[1] x) => (float[a, b] y, float[1] x_out) <int8[2, 3] q = {{-100, 2, -3, 4, -5, 6}}, float s = {{0.5}}, "
        "int8 z = {0}, int64[1] flat = {-1}, int64[1] first = {0}, int64[1] ends = {1}> "
        f"{{ d = DequantizeLinear(q, s{zero_point}) y = {moved} x_out = Identity(x) }}",
        opset,
        10,
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {"x": np.ones(1, np.float32)}
    expected = get_backend("numpy").prepare(model).run(feeds)["y"]
    np.testing.assert_array_equal(ort.prepare(model).run(feeds)["y"], expected)
    live = parse(
        "g (float[2, 3] x) => (float[3, 2] y) <float s = {0.5}, int8 z = {0}> "
        "{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Transpose(d) }",
        opset,
        10,
    )
    values = np.float32([[-50, 1, -1.5], [2, -2.5, 3]])
    np.testing.assert_array_equal(ort.prepare(live).run({"x": values})["y"], values.T)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int4"])
def test_a_product_with_dequantized_weights_keeps_the_digits_of_the_other_factor(kind: str) -> None:
    model = parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        m (float[N, 48] x, float[8] scale) => (float[N, 8] y) { w = DequantizeLinear<axis = 1>(q, scale)  y = MatMul(x, w) }
    """)
    del model.graph.input[1]
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 8, (48, 8))
    scale = rng.uniform(0.002, 0.02, 8).astype(np.float32)
    made = helper.make_tensor("q", getattr(onnx.TensorProto, kind.upper()), (48, 8), numbers.ravel().tolist())
    model.graph.initializer.extend([made, onnx.numpy_helper.from_array(scale, "scale")])
    x = rng.standard_normal((4, 48)).astype(np.float32)
    expected = x.astype(float) @ (numbers * scale.astype(float))
    for settings in ({}, {"config": {"session.intra_op.allow_spinning": "0"}}):
        found = get_backend("ort-cpu").prepare(model, **settings).run({"x": x})["y"]
        np.testing.assert_allclose(found, expected, atol=1e-5)

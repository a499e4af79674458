"""Adapters in files of ONNX Runtime: `AdapterFormat` reads them, and a session computes what the adapted model does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from refgrad.backends import get_backend
from refgrad.errors import OptionError, OutputFileError
from refgrad.training import Adam, Training, lora, save_adapter, step_model, with_adapter_inputs

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(
    not hasattr(onnxruntime, "AdapterFormat"), reason="ONNX Runtime has adapters from 1.20 on"
)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 3)).astype(np.float32)


def model(kind: str = "float") -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> m ({kind}[N, 3] x) => ({kind}[N, 2] y) '
        "{ h = MatMul(x, w)  t = Tanh(h)  y = Gemm<transB = 1>(t, v) }"
    )
    for name, shape in (("w", (3, 4)), ("v", (2, 4))):
        value = RNG.standard_normal(shape).astype({"float": np.float32, "float16": np.float16}[kind])
        made.graph.initializer.append(numpy_helper.from_array(value, name))
    return made


def test_a_session_computes_what_the_adapted_model_does(tmp_path: Path) -> None:
    base = model()
    adapted = lora(base, rank=2, alpha=3)
    training = Training(step_model(adapted, "squared_error", Adam()), 0.1)
    for _ in range(5):
        training.train_on({"x": X, "label": np.ones((5, 2), np.float32)}, 0.1)
    trained = training.write_to(adapted)
    file = tmp_path / "tuned.onnx_adapter"
    save_adapter(file, trained, adapter_version=3, model_version=2**31 - 1)
    read = onnxruntime.AdapterFormat.read_adapter(str(file))
    assert (read.get_adapter_version(), read.get_model_version(), read.get_format_version()) == (3, 2**31 - 1, 1)
    found = {name: value.numpy() for name, value in read.get_parameters().items()}
    assert set(found) == {"w.lora_A", "w.lora_B", "v.lora_A", "v.lora_B"} == set(training.weights)
    for name, value in training.weights.items():
        np.testing.assert_array_equal(found[name], value)
    served = with_adapter_inputs(trained)
    onnx.checker.check_model(served, full_check=True)
    session = onnxruntime.InferenceSession(served.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = get_backend("numpy").prepare(base).run({"x": X}).values()
    np.testing.assert_allclose(session.run(None, {"x": X})[0], expected, rtol=1e-5, atol=1e-6)
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(file))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    [tuned] = get_backend("numpy").prepare(trained).run({"x": X}).values()
    assert np.abs(tuned - expected).max() > 0.1
    np.testing.assert_allclose(session.run(None, {"x": X}, options)[0], tuned, rtol=1e-4, atol=1e-5)


def test_half_precision_and_external_data(tmp_path: Path) -> None:
    adapted = lora(model("float16"), rank=1)
    values = {t.name: numpy_helper.to_array(t) for t in adapted.graph.initializer if ".lora_" in t.name}
    place, file = tmp_path / "m.onnx", tmp_path / "a.onnx_adapter"
    onnx.save(adapted, place, save_as_external_data=True, location="m.data", size_threshold=0)
    save_adapter(file, place, adapter_version=0)
    parameters = onnxruntime.AdapterFormat.read_adapter(str(file)).get_parameters()
    assert parameters.keys() == values.keys()
    for name, value in values.items():
        assert parameters[name].element_type() == onnx.TensorProto.FLOAT16
        np.testing.assert_array_equal(parameters[name].numpy(), value)


def test_adapters_are_written_beside_weights_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    adapted = lora(tmp_path / "m.onnx", rank=1)
    (tmp_path / "m.data").unlink()
    save_adapter(tmp_path / "a.onnx_adapter", adapted)
    assert onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter")).get_parameters()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no adapters"):
        save_adapter(tmp_path / "a", model())
    with pytest.raises(OptionError, match="has no adapters"):
        with_adapter_inputs(model())
    with pytest.raises(OptionError, match="model_version is an integer of 32 bits, not 2147483648"):
        save_adapter(tmp_path / "a", lora(model(), rank=1), model_version=2**31)
    for version in (np.int64(2), 2.0, "2", True):
        with pytest.raises(OptionError, match="adapter_version is an integer of 32 bits"):
            save_adapter(tmp_path / "a", lora(model(), rank=1), adapter_version=version)
    onnx.save(lora(model(), rank=1), tmp_path / "m.onnx")
    with pytest.raises(OutputFileError, match="Write to another file"):
        save_adapter(tmp_path / "m.onnx", tmp_path / "m.onnx")

"""Low-rank adapters: they change nothing at first, are trained alone, and merge into the weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from refgrad.backends import get_backend
from refgrad.errors import OptionError, UnknownNameError
from refgrad.training import SGD, Adam, Training, batches, lora, merge_adapters, step_model

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore:rank=8 is more than the weight")]


def _model(**gemm: float) -> ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 5), "v": (3, 5) if gemm.get("transB") else (5, 3), "b": (3,)}
    tensors = [numpy_helper.from_array(rng.standard_normal(shape), name) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[1, 0]),
        helper.make_node("Gemm", ["t" if gemm.get("transA") else "h", "v", "b"], ["y"], **gemm),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 11, ["N", 4])],
        [helper.make_tensor_value_info("y", 11, ["N", 3])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def _run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    result: np.ndarray = get_backend("numpy").prepare(model).run({"x": x})["y"]
    return result


@pytest.mark.parametrize("gemm", [{}, {"transB": 1, "alpha": 0.5}, {"transA": 1}, {"transA": 1, "transB": 1}], ids=str)
def test_adapters_are_trained_alone_and_merged(gemm: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((6, 4)), rng.standard_normal((6, 3))
    model = _model(**gemm)
    adapted = lora(model, rank=2, alpha=3)
    np.testing.assert_array_equal(_run(adapted, x), _run(model, x))
    training = Training(step_model(adapted, optimizer=Adam()), 0.05)
    assert list(training.weights) == ["w.lora_A", "w.lora_B", "v.lora_A", "v.lora_B"]
    for _ in range(60):
        training.epoch(batches({"x": x, "label": y}, 6))
    trained = training.write_to(adapted)
    merged = merge_adapters(trained)
    assert [node.op_type for node in merged.graph.node] == [node.op_type for node in model.graph.node]
    assert [tensor.name for tensor in merged.graph.initializer] == ["w", "v", "b"]
    np.testing.assert_allclose(_run(merged, x), _run(trained, x), rtol=0, atol=1e-12)
    assert np.mean((_run(merged, x) - y) ** 2) < np.mean((_run(model, x) - y) ** 2) / 4
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in trained.graph.initializer}
    for tensor in model.graph.initializer:
        np.testing.assert_array_equal(held[tensor.name], numpy_helper.to_array(tensor))


def test_a_step_is_that_of_the_formulas() -> None:
    """y = x·(W + s·A·B): dA = s·xᵀ·dy·Bᵀ and dB = s·Aᵀ·xᵀ·dy."""
    rng = np.random.default_rng(2)
    x, y, w = rng.standard_normal((7, 3)), rng.standard_normal((7, 2)), rng.standard_normal((3, 2))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 11, ["N", 3])],
        [helper.make_tensor_value_info("y", 11, ["N", 2])],
        [numpy_helper.from_array(w, "w")],
    )
    adapted = lora(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), rank=1, alpha=2)
    training = Training(step_model(adapted, optimizer=SGD(), reduction="sum"), 0.01)
    a, b = (training.weights[f"w.lora_{end}"].copy() for end in "AB")
    for _ in range(3):
        training.epoch(batches({"x": x, "label": y}, 7))
        d = 2 * (x @ (w + 2 * a @ b) - y)
        a, b = a - 0.01 * 2 * x.T @ d @ b.T, b - 0.01 * 2 * a.T @ x.T @ d
    np.testing.assert_allclose(training.weights["w.lora_A"], a, rtol=0, atol=1e-12)
    np.testing.assert_allclose(training.weights["w.lora_B"], b, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    model = _model()
    with pytest.raises(UnknownNameError, match=r"'b' is not a weight .* There are: 'w', 'v'"):
        lora(model, ["b"])
    with pytest.raises(UnknownNameError, match="'head"):
        lora(model, "head.*")
    for wrong in ({"rank": 0}, {"rank": 1.5}, {"alpha": 0}, {"alpha": float("nan")}):
        with pytest.raises(OptionError):
            lora(model, "*", **wrong)
    with pytest.raises(OptionError, match=r"weights=\[\] names no weight that gets adapters\. There are: 'w', 'v'"):
        lora(model, [])
    with pytest.raises(OptionError, match="weights is a list of names or patterns"):
        lora(model, 3)
    with pytest.raises(OptionError, match="has adapters already"):
        lora(lora(model))
    with pytest.raises(OptionError, match="has no adapters"):
        merge_adapters(model)
    broken = lora(model)
    del broken.graph.initializer[-1]
    with pytest.raises(OptionError, match="are not there"):
        merge_adapters(broken)


def test_patterns_beside_adapters() -> None:
    """A pattern stands for the adapters that it matches. If it matches none, it stands for other weights."""
    adapted = lora(_model(), ["w"], rank=1)
    for trainable, names in (
        (["*.lora_?", "b*"], ["w.lora_A", "w.lora_B", "b"]),
        (["w*"], ["w.lora_A", "w.lora_B"]),
        (["*"], ["w.lora_A", "w.lora_B"]),
        (["w", "b*"], ["w", "b"]),
        (["v*"], ["v"]),
    ):
        assert {*step_model(adapted, trainable=trainable).weights} == {*names}
    with pytest.raises(UnknownNameError, match=r"The pattern 'z\*' in trainable matches no float input"):
        step_model(adapted, trainable=["z*"])


def test_a_name_that_is_given_twice_has_one_adapter() -> None:
    assert lora(_model(), ["w", "w"]) == lora(_model(), ["w"])


def test_a_weight_that_others_read_has_no_adapter() -> None:
    """Merging would change what an embedding reads."""
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["e"]),
            helper.make_node("MatMul", ["e", "w"], ["h"]),
            helper.make_node("Gemm", ["h", "table"], ["y"], transB=1),
        ],
        "g",
        [helper.make_tensor_value_info("ids", 7, ["N"])],
        [helper.make_tensor_value_info("y", 11, ["N", 6])],
        [
            numpy_helper.from_array(rng.standard_normal(shape), name)
            for name, shape in (("table", (6, 4)), ("w", (4, 4)))
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with pytest.raises(OptionError, match="'table' has a reader that gets no adapter"):
        lora(model, ["table"])
    assert [tensor.name for tensor in lora(model, "*").graph.initializer] == ["table", "w", "w.lora_A", "w.lora_B"]


@pytest.mark.filterwarnings("ignore:rank=1 is more than the weight")
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)], ids=str)
def test_a_weight_without_elements_is_merged(shape: tuple[int, int]) -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", shape[0]])],
        [helper.make_tensor_value_info("y", 1, ["N", shape[1]])],
        [numpy_helper.from_array(np.zeros(shape, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert merge_adapters(lora(model, "w", rank=1)).graph.initializer == model.graph.initializer


def test_a_large_weight_is_merged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(transB=1)
    training = Training(step_model(lora(model, rank=2), optimizer=Adam()), 0.05)
    rng = np.random.default_rng(1)
    training.epoch(batches({"x": rng.standard_normal((6, 4)), "label": rng.standard_normal((6, 3))}, 6))
    trained = training.write_to(lora(model, rank=2))
    whole = merge_adapters(trained)
    monkeypatch.setattr("refgrad.training.adapters._BLOCK", 7)
    for tensor, due in zip(merge_adapters(trained).graph.initializer, whole.graph.initializer, strict=True):
        np.testing.assert_allclose(numpy_helper.to_array(tensor), numpy_helper.to_array(due), rtol=0, atol=1e-15)


def test_adapters_of_before_are_known() -> None:
    """Their metadata does not say whether the weight is quantized."""
    adapted = lora(_model(), "w*", rank=1)
    [entry] = [entry for entry in adapted.metadata_props if entry.key == "refgrad.adapters"]
    entry.value = entry.value.replace(', "quantized": false', "")
    assert "quantized" not in entry.value
    assert not [t.name for t in merge_adapters(adapted).graph.initializer if "lora" in t.name]

"""Adapters beside quantized weights: the weights stay, and each step equals the step of the dequantized model."""

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import ModelWarning, OptionError, UnknownNameError
from refgrad.training import SGD, Adam, Training, lora, merge_adapters, step_model

pytestmark = pytest.mark.interpreter

ROWS, WIDE, OUT, BLOCK = 10, 32, 6, 16
RATE = 0.02
LAYERS = {  # the nodes of each layer with a quantized weight, with the same weight in float, and with adapters beside that
    "table": (
        "e = com.microsoft.GatherBlockQuantized <bits = 4, block_size = 16, quantize_axis = 1, gather_axis = 0>"
        "(table, tokens, table_scales)",
        "e = Gather(table_float, tokens)",
        "eA = Gather(table_A, tokens)  eB = MatMul(eA, table_B)  e0 = Gather(table_float, tokens)  e = Add(e0, eB)",
    ),
    "packed": (
        f"h = com.microsoft.MatMulNBits <K = {WIDE}, N = {WIDE}, bits = 4, block_size = {BLOCK}>(e, packed, packed_scales)",
        "h = MatMul(e, packed_float)",
        "hA = MatMul(e, packed_A)  hB = MatMul(hA, packed_B)  h0 = MatMul(e, packed_float)  h = Add(h0, hB)",
    ),
    "whole": (
        "w = DequantizeLinear <axis = 0>(whole, whole_scales)  t = Transpose <perm = [1, 0]>(w)  y = MatMul(h, t)",
        "y = MatMul(h, whole_turned)",
        "yA = MatMul(h, whole_A)  yB = MatMul(yA, whole_B)  y0 = MatMul(h, whole_turned)  y = Add(y0, yB)",
    ),
}
RNG = np.random.default_rng(0)


def quantized(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of 4 bits [rows, WIDE / 2], the scales of their blocks, and the numbers in float32."""
    q = RNG.integers(0, 16, (rows, WIDE), np.uint8)
    scales = RNG.uniform(0.02, 0.1, (rows, WIDE // BLOCK)).astype(np.float32)
    return q[:, ::2] | q[:, 1::2] << 4, scales, (q - np.float32(8)) * scales.repeat(BLOCK, 1)


TABLE, PACKED = quantized(ROWS), quantized(WIDE)
WHOLE, SCALES = RNG.integers(-100, 100, (OUT, WIDE), np.int8), RNG.uniform(0.001, 0.01, OUT).astype(np.float32)
QUANTIZED = {
    "table": TABLE[0],
    "table_scales": TABLE[1],
    "packed": PACKED[0].reshape(WIDE, WIDE // BLOCK, BLOCK // 2),
    "packed_scales": PACKED[1],
    "whole": WHOLE,
    "whole_scales": SCALES,
}
FLOATS = {
    "table_float": TABLE[2],
    "packed_float": PACKED[2].T.copy(),
    "whole_turned": (WHOLE * SCALES[:, None]).T.copy(),
}


def model_of(columns: dict[str, int], weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The layers, each in its form of `LAYERS`."""
    body = "  ".join(LAYERS[name][column] for name, column in columns.items())
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> '
        f"g (int64[N, 3] tokens) => (float[N, 3, {OUT}] y) {{ {body} }}"
    )
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def initializers(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"tokens": rng.integers(0, ROWS, (8, 3)), "label": rng.standard_normal((8, 3, OUT)).astype(np.float32)}


@pytest.mark.parametrize("backend", ["numpy", "ort-cpu"])
@pytest.mark.parametrize("adapted", [["table"], ["packed"], ["whole"], list(LAYERS)], ids="+".join)
def test_the_steps_are_those_of_the_float_model(adapted, backend):
    model = lora(model_of(dict.fromkeys(LAYERS, 0), QUANTIZED), adapted, rank=4, seed=3)
    starts = {n.replace(".lora", ""): x for n, x in initializers(model).items() if ".lora_" in n}
    float_model = model_of({name: 2 if name in adapted else 1 for name in LAYERS}, FLOATS | starts)
    one = Training(step_model(model, optimizer=SGD()), RATE, backend)
    other = Training(step_model(float_model, optimizer=SGD(), trainable=list(starts)), RATE, backend)
    losses = [(one.train_on(data(), RATE), other.train_on(data(), RATE)) for _ in range(5)]
    # ONNX Runtime fuses DequantizeLinear and MatMul where nothing else reads the weight, and quantizes the other operand too.
    is_fused = backend == "ort-cpu" and adapted == ["whole"]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-3 if is_fused else 3e-6)
    assert losses[-1][0] < losses[0][0]
    for name, value in one.weights.items():
        expected = other.weights[name.replace(".lora", "")]
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-3 if is_fused else 1e-6)


def test_the_quantized_weights_stay_and_keep_their_adapters():
    source = model_of(dict.fromkeys(LAYERS, 0), QUANTIZED)
    adapted = lora(source, rank=2)
    training = Training(step_model(adapted, optimizer=Adam()))
    training.train_on(data(), 1e-2)
    trained = training.write_to(adapted)
    for name, value in QUANTIZED.items():
        np.testing.assert_array_equal(initializers(trained)[name], value)
    with pytest.warns(ModelWarning, match="adapters of 'table', 'packed', 'whole' stay"):
        assert merge_adapters(trained) == trained
    with pytest.raises(OptionError, match="has adapters already"):
        lora(trained)


def test_float_weights_beside_quantized_ones_are_merged():
    adapted = lora(
        model_of({"table": 0, "packed": 1, "whole": 0}, QUANTIZED | FLOATS), ["packed_float", "table"], rank=2
    )
    with pytest.warns(ModelWarning, match="adapters of 'table' stay"):
        merged = merge_adapters(adapted)
    names = initializers(merged).keys()
    assert "table.lora_A" in names
    assert "packed_float.lora_A" not in names
    feeds = {"tokens": data()["tokens"]}
    expected, got = (get_backend("numpy").prepare(model).run(feeds)["y"] for model in (adapted, merged))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_weights_that_stay_quantized_are_named():
    both = model_of({"table": 0, "packed": 1, "whole": 0}, QUANTIZED | FLOATS)
    with pytest.warns(
        ModelWarning, match="Quantized weights stay as they are: 'table', .* Adapters beside them can be"
    ):
        assert [*step_model(both).weights] == ["packed_float"]
    with pytest.raises(
        UnknownNameError, match=r"the weights are quantized \('table', 'packed', 'whole'\)\. Adapters beside"
    ):
        step_model(model_of(dict.fromkeys(LAYERS, 0), QUANTIZED))


def test_the_advice_for_a_rank_that_is_too_large():
    with pytest.warns(
        ModelWarning, match=r"weights 'table', 'packed' need: .* than the weights\. Take a smaller rank\.$"
    ):
        lora(model_of(dict.fromkeys(LAYERS, 0), QUANTIZED), ["table", "packed"], rank=500)


def test_other_integers_have_no_adapters():
    table = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (int64[N] i) => (float[N, 2] y) <int8[3, 2] t = {1, 2, 3, 4, 5, 6}> '
        "{ r = Gather(t, i)  y = Cast <to = 1>(r) }"
    )
    with pytest.raises(UnknownNameError, match="no weight that can have adapters"):
        lora(table)


def test_the_shell_trains_adapters_of_a_quantized_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    onnx.save(model_of(dict.fromkeys(LAYERS, 0), QUANTIZED), "q.onnx")
    np.savez("d.npz", **data())
    assert (
        main(
            [
                "train",
                "q.onnx",
                "--data",
                "d.npz",
                "--lora",
                "*",
                "--rank",
                "4",
                "--epochs",
                "30",
                "--rate",
                "0.02",
                "-o",
                "t.onnx",
            ]
        )
        == 0
    )
    shown = capsys.readouterr()
    assert "stay" in shown.err
    trained = onnx.load("t.onnx")
    onnx.checker.check_model(trained)
    first, last = map(float, shown.out.split("loss ")[1].split(" in ")[0].split(" -> "))
    assert last < 0.7 * first
    y = get_backend("ort-cpu").prepare(trained).run({"tokens": data()["tokens"]})["y"]
    np.testing.assert_allclose(np.mean((y - data()["label"]) ** 2), last, rtol=0.2)

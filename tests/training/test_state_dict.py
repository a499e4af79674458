"""What initializers are, of which tensors of a state_dict they are made, and how new values get back."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import InvalidModelError, OptionError, UnknownNameError
from refgrad.model.roles import KINDS
from refgrad.parameters.states import read_state_dict

pytestmark = pytest.mark.interpreter

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def model(text: str, **initializers: np.ndarray) -> ModelProto:
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "local": 1]> {text}')
    made.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in initializers.items())
    return made


def kinds(made: ModelProto, **options: dict[str, np.ndarray]) -> dict[str, str]:
    return {name: weight.kind for name, weight in refgrad.weights(made, **options).items()}


def values(made: ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}


def test_the_operators_that_read_it_tell_what_it_is() -> None:
    made = model(
        """g (float[2, 4] x) => (float[2, 3] z) {
            xw = MatMul(x, w) a = Add(xw, b) n = BatchNormalization(a, scale, shift, mean, var)
            d = Mul(n, half) r = Reshape(d, two) c = Clip(r, low, high) q = Where(hidden, c, far)
            m = Add(q, scores) s = Softmax(m) z = Mul(s, cosines) }""",
        w=normal(4, 3),
        b=np.zeros(3, np.float32),
        scale=np.ones(3, np.float32),
        shift=np.zeros(3, np.float32),
        mean=normal(3),
        var=normal(3) ** 2,
        half=np.array(0.5, np.float32),
        two=np.array([2, 3]),
        low=np.array(-9, np.float32),
        high=np.array(9, np.float32),
        hidden=np.ones((2, 3), bool),
        far=np.array([-1e9], np.float32),
        scores=np.array([[0, -np.inf, 0], [0, 0, -np.inf]], np.float32),
        cosines=np.ones((2, 3), np.float32),
        nobody=normal(2),
    )
    assert kinds(made) == {
        **dict.fromkeys(("w", "b", "scale", "shift"), "parameter"),
        **dict.fromkeys(("mean", "var"), "statistic"),
        **dict.fromkeys(("half", "low", "high", "far"), "scalar"),
        **dict.fromkeys(("hidden", "scores"), "mask"),
        "two": "shape",
        "cosines": "constant",
        "nobody": "unused",
    }
    assert set(kinds(made).values()) <= KINDS.keys()
    assert refgrad.weights(made).trainable == ["w", "b", "scale", "shift"]
    assert refgrad.weights(made)["mean"].reads == ("BatchNormalization:3",)


def test_through_rearrangements_and_quantization() -> None:
    made = model(
        """g (float[2, 4] x) => (float[2, 3] y) {
            k = DequantizeLinear(small, step, zero) t = Transpose <perm = [1, 0]> (k) y0 = MatMul(x, t)
            h = Cast <to = 1> (wide) i = Identity(h) f = Reshape(i, sizes) y = Gemm(y0, f, bias) }""",
        small=RNG.integers(-99, 99, (3, 4)).astype(np.int8),
        step=np.array(0.01, np.float32),
        zero=np.array(0, np.int8),
        wide=normal(9, dtype=np.float16),
        sizes=np.array([3, 3]),
        bias=np.zeros((1,), np.float32),
    )
    assert kinds(made) == {
        "small": "quantized",
        **dict.fromkeys(("step", "zero"), "quantization"),
        **dict.fromkeys(("wide", "bias"), "parameter"),
        "sizes": "shape",
    }


def test_the_schema_tells_what_an_input_is() -> None:
    made = model(
        """g (float[2, 4] x, int64[2] labels) => (float loss) {
            a = com.microsoft.GatedRMSNorm(x, ones, x) t = com.microsoft.QLinearAdd(q, sa, za, r, sb, zb, sc, zc)
            s = ReduceSum(a, axes) w = HannWindow(size) p = ReduceMax(counts)
            loss = SoftmaxCrossEntropyLoss(a, labels, classes) }""",
        ones=np.ones(4, np.float32),
        q=np.array([1, 2], np.uint8),
        r=np.array([3, 4], np.uint8),
        **{name: np.array([0.5], np.float32) for name in ("sa", "sb", "sc")},
        **{name: np.array([3], np.uint8) for name in ("za", "zb", "zc")},
        axes=np.array([1]),
        size=np.array(4),
        counts=np.array([4, 2]),
        classes=np.ones(4, np.float32),
    )
    made.opset_import.add(domain="com.microsoft", version=1)
    assert kinds(made) == {
        "ones": "parameter",
        **dict.fromkeys(("q", "r"), "quantized"),
        **dict.fromkeys(("sa", "sb", "sc", "za", "zb", "zc"), "quantization"),
        **dict.fromkeys(("axes", "size"), "shape"),
        **dict.fromkeys(("counts", "classes"), "constant"),
    }


def test_in_bodies_and_functions() -> None:
    made = model(
        """g (float[2, 4] x, bool c) => (float[2, 3] y) {
            y0 = If (c) <then_branch = t () => (float[2, 3] u) { u = MatMul(x, w) },
                         else_branch = e () => (float[2, 3] v) { v = MatMul(x, w2) }>
            chosen = If (c) <then_branch = t2 () => (float[3] b1) { b1 = Identity(first) },
                             else_branch = e2 () => (float[3] b2) { b2 = Identity(second) }>
            y1 = LayerNormalization(y0, chosen) y2 = local.outer(y1, inner)
            y = Loop(n, , y2, carried) <body = b (int64 i, bool go, float[2, 3] state, float[3, 3] k)
                    => (bool on, float[2, 3] next, float[3, 3] same) {
                on = Identity(go) next = MatMul(state, k) same = Identity(k) }> }
        <domain: "local", opset_import: ["": 21, "local": 1]> outer (p, q) => (r) { r = local.within(p, q) }
        <domain: "local", opset_import: ["": 21]> within (a, k) => (r) { t = Transpose(k) r = MatMul(a, t) }""",
        w=normal(4, 3),
        w2=normal(4, 3),
        first=normal(3),
        second=normal(3),
        inner=normal(3, 3),
        n=np.array(2),
        carried=normal(3, 3),
    )
    found = kinds(made)
    assert found.pop("n") != "parameter"
    assert set(found.values()) == {"parameter"}
    assert refgrad.weights(made)["inner"].reads == ("MatMul:1",)


def test_tables_of_the_exporter_are_no_parameters() -> None:
    angle = np.outer(np.arange(6), 0.1 ** np.arange(4)).astype(np.float32)
    made = model(
        """g (float[6, 4] x) => (float[6, 4] y) {
            a = Mul(x, cosine) b = Mul(x, sine) c = Add(a, b) d = Mul(c, frequencies) y = Add(d, positions) }""",
        cosine=np.cos(angle),
        sine=np.sin(angle),
        frequencies=(0.5 ** np.arange(4)).astype(np.float32),
        positions=np.arange(4, dtype=np.float32),
    )
    assert set(kinds(made).values()) == {"constant"}
    assert refgrad.weights(made).trainable == []


def test_a_bias_of_one_element_is_a_parameter() -> None:
    made = model(
        "g (float[N, 4] x) => (float[N, 1] z) { p = MatMul(x, w) y = Add(p, b) z = Sub(y, unity) }",
        w=normal(4, 1),
        b=normal(1),
        unity=np.ones(1, np.float32),
    )
    assert kinds(made) == {"w": "parameter", "b": "parameter", "unity": "scalar"}


# Exports: a model, a state_dict, and what the initializers are made of. `out` is the model's formula in NumPy.
GATES = "iofc"  # the order of ONNX; torch has ifco, where c is called g


def gates(value: np.ndarray) -> np.ndarray:
    i, f, c, o = np.split(value, 4)
    return np.concatenate([i, o, f, c])


def folded(state: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    factor = state["norm.weight"] / np.sqrt(state["norm.running_var"] + np.float32(1e-5))
    weight = state["conv.weight"] * factor.reshape(-1, 1, 1, 1)
    return weight, (state["conv.bias"] - state["norm.running_mean"]) * factor + state["norm.bias"]


STATES = {
    "plain": {"w": normal(3, 4), "b": normal(3), "g": normal(3)},
    "lstm": {"ih": normal(12, 4), "hh": normal(12, 3), "bias_ih": normal(12), "bias_hh": normal(12)},
    "qkv": {"q": normal(4, 4), "k": normal(4, 4), "v": normal(4, 4)},
    "split": {"qkv": normal(12, 4)},
    "gathered": {"position": normal(9, 4), "token": normal(1, 1, 4)},
    "folded": {
        "conv.weight": normal(3, 2, 2, 2),
        "conv.bias": normal(3),
        "norm.weight": normal(3),
        "norm.bias": normal(3),
        "norm.running_mean": normal(3),
        "norm.running_var": normal(3) ** 2 + 1,
        "norm.num_batches_tracked": np.array(7),
    },
    "computed": {"norm": normal(4), "A_log": normal(4, 2), "original0": normal(1, 1, 3), "original1": normal(5, 4, 3)},
    "tied": (lambda w: {"embed.weight": w, "head.weight": w})(normal(7, 4)),
}
EXPORTS = {
    "plain": lambda s: {"val_1": s["w"].T.copy(), "b": s["b"], "val_2": s["g"].reshape(1, 3, 1)},
    "lstm": lambda s: {
        "W": gates(s["ih"])[None],
        "R": gates(s["hh"])[None],
        "B": np.concatenate([gates(s["bias_ih"]), gates(s["bias_hh"])])[None],
    },
    "qkv": lambda s: {"val": np.concatenate([s["q"], s["k"], s["v"]]).T.copy()},
    "split": lambda s: dict(zip(("val_q", "val_k", "val_v"), (p.T.copy() for p in np.split(s["qkv"], 3)), strict=True)),
    "gathered": lambda s: {"e": s["position"][[0, 3, 4, 5, 3]][None], "t": np.tile(s["token"], (2, 1, 1))},
    "folded": lambda s: dict(zip(("conv.weight", "conv.weight_bias"), folded(s), strict=True)),
    "computed": lambda s: {
        "add_1": s["norm"] + np.float32(1),
        "neg": -np.exp(s["A_log"])[None],
        "mul": s["original1"] * (s["original0"] / np.sqrt((s["original1"] ** 2).sum((0, 1), keepdims=True))),
    },
    "tied": lambda s: {"embed.weight": s["embed.weight"], "val_9": s["embed.weight"].T.copy()},
}
HOW = {
    "plain": {"val_1": "transposed", "b": "equal", "val_2": "equal"},
    "lstm": {"W": "reordered", "R": "reordered", "B": "merged"},
    "qkv": {"val": "merged"},
    "split": {"val_q": "split", "val_k": "split", "val_v": "split"},
    "gathered": {"e": "gathered", "t": "gathered"},
    "folded": {"conv.weight": "folded", "conv.weight_bias": "folded"},
    "computed": {"add_1": "x + 1", "neg": "-exp(x)", "mul": "weight_norm"},
    "tied": {"embed.weight": "equal, tied", "val_9": "transposed, tied"},
}


def exported(name: str, state: dict[str, np.ndarray]) -> ModelProto:
    """A model with the initializers of an export: each is read as a weight; only of a Conv it matters how."""
    tensors = EXPORTS[name](state)
    if name == "folded":
        return model(
            "g (float[1, 2, 5, 5] x) => (float[1, 3, 4, 4] y) { y = Conv(x, conv.weight, conv.weight_bias) }".replace(
                "conv.weight_bias", '"conv.weight_bias"'
            ).replace("conv.weight,", '"conv.weight",'),
            **tensors,
        )
    nodes = [helper.make_node("MatMul", ["x", tensor], [f"y{k}"]) for k, tensor in enumerate(tensors)]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, None)], [])
    graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in tensors.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


@pytest.mark.parametrize("name", STATES)
def test_each_initializer_is_found_and_follows_new_values(name: str) -> None:
    state = STATES[name]
    made = exported(name, state)
    before = made.SerializeToString(deterministic=True)
    found = refgrad.weights(made, state)
    assert {key: weight.how for key, weight in found.items()} == HOW[name]
    assert found.missing == []
    assert refgrad.write_back(made, state, found).SerializeToString(deterministic=True) == before
    trained = {
        key: value + normal(*value.shape) ** 2 if value.dtype.kind == "f" else value + 1 for key, value in state.items()
    }
    if name == "tied":
        trained["head.weight"] = trained["embed.weight"]
    again = values(refgrad.write_back(made, trained, pickle.loads(pickle.dumps(found))))
    for key, value in EXPORTS[name](trained).items():
        np.testing.assert_array_equal(again[key], value, strict=True)
    assert made.SerializeToString(deterministic=True) == before


def test_a_state_of_another_float_type() -> None:
    state = {"w": normal(3, 4, dtype=np.float64)}
    made = model("g (float[N, 4] x) => (float[N, 3] y) { y = MatMul(x, k) }", k=state["w"].T.astype(np.float32))
    found = refgrad.weights(made, state)
    assert found["k"].how == "transposed"
    again = values(refgrad.write_back(made, {"w": state["w"] + 1}, found))
    np.testing.assert_array_equal(again["k"], (state["w"] + 1).T.astype(np.float32))


def test_equal_values_are_not_guessed() -> None:
    zeros = np.zeros(3, np.float32)
    state = {"w": normal(3, 3), "a.bias": zeros, "b.bias": zeros, "eye": np.eye(3, dtype=np.float32)}
    made = model(
        "g (float[N, 3] x) => (float[N, 3] y) { p = Gemm(x, k, one) q = Gemm(p, e, two) y = Add(q, zero) }",
        k=state["w"].T.copy(),
        one=zeros,
        two=zeros,
        e=state["eye"],
        zero=np.zeros((1, 3, 1), np.float32),
    )
    found = refgrad.weights(made, state)
    assert {name: weight.how for name, weight in found.items()} == {
        "k": "transposed",
        **dict.fromkeys(("one", "two", "e", "zero"), "ambiguous"),
    }
    refgrad.write_back(made, state, found)
    with pytest.raises(OptionError, match=r"not clear which of 'a\.bias', 'b\.bias' is the initializer 'one'"):
        refgrad.write_back(made, {**state, "a.bias": zeros + 1}, found)
    with pytest.raises(OptionError, match="in which order"):
        refgrad.write_back(made, {"eye": state["eye"] + 1}, found)
    assert values(refgrad.write_back(made, {"one": zeros + 2}, found))["one"].tolist() == [2, 2, 2]


def test_a_mask_and_a_scalar_of_the_state_are_told_by_its_name() -> None:
    made = model(
        "g (float[N, 2] x) => (float[N, 2] z) { y = Mul(x, temperature) z = Mul(y, two) }",
        temperature=np.array(0.5, np.float32),
        two=np.array(2, np.float32),
    )
    state = {"temperature": np.array(0.5, np.float32), "other": np.array(2, np.float32)}
    assert kinds(made, state_dict=state) == {"temperature": "parameter", "two": "scalar"}


def refused() -> dict[str, tuple[dict[str, object], str]]:
    return {
        "unknown": ({"ww": normal(3, 4)}, "'ww' in values is no initializer.*Did you mean 'w'"),
        "shape": ({"w": normal(4, 3)}, r"float32\[4, 3\], and the tensor of the state_dict is float32\[3, 4\]"),
        "dtype": ({"b": normal(3, dtype=np.float64)}, r"'b' in values is float64\[3\]"),
        "initializer": ({"val_1": normal(3, 4)}, r"the initializer is float32\[4, 3\]"),
        "both": ({"val_1": normal(4, 3), "w": normal(3, 4)}, "'val_1' and also 'w', from which it is made"),
        "text": ({"b": "three"}, "'b' in values is no array of numbers"),
    }


@pytest.mark.parametrize("name", refused())
def test_values_that_do_not_fit_are_refused(name: str) -> None:
    made = exported("plain", STATES["plain"])
    found = refgrad.weights(made, STATES["plain"])
    given, message = refused()[name]
    with pytest.raises((OptionError, UnknownNameError), match=message):
        refgrad.write_back(made, given, found)


def test_parts_of_what_belongs_together_are_refused() -> None:
    state = STATES["folded"]
    made = exported("folded", state)
    found = refgrad.weights(made, state)
    with pytest.raises(OptionError, match=r"'conv.weight' \(folded\) is made from .*: give 'norm.weight', 'norm.bias'"):
        refgrad.write_back(made, {"conv.weight": state["conv.weight"] + 1}, found)
    tied = STATES["tied"]
    made = exported("tied", tied)
    with pytest.raises(OptionError, match=r"'embed\.weight', 'head\.weight' have different values.* one initializer"):
        refgrad.write_back(made, {**tied, "head.weight": normal(7, 4)}, refgrad.weights(made, tied))


def test_a_trained_tensor_without_a_place_is_refused() -> None:
    state = {**STATES["plain"], "unused": normal(5)}
    made = exported("plain", state)
    found = refgrad.weights(made, state)
    assert found.missing == ["unused"]
    refgrad.write_back(made, state, found)
    with pytest.raises(OptionError, match="'unused' changed, but no initializer is made from it"):
        refgrad.write_back(made, {**state, "unused": normal(5)}, found)


def test_what_the_exporter_computed_in_another_way_cannot_become_stale() -> None:
    state = {"items": normal(5, 3), "log": normal(4)}
    norms, total = np.linalg.norm(state["items"], axis=1), state["log"].sum()
    made = model(
        """g (float[N, 3] x, int64[N] k) => (float[N, 4] y) {
            s = MatMul(x, t) d = Gather(norms, k) n = Unsqueeze(d, one) q = Div(s, n) u = Add(q, total) y = Add(u, log) }""",
        t=normal(3, 4),
        norms=norms,
        one=np.array([1]),
        total=total,
        log=state["log"],
    )
    state["t"] = values(made)["t"]
    found = refgrad.weights(made, state)
    assert found["total"].kind == "unexplained"
    assert found["norms"].source is None
    refgrad.write_back(made, state, found)
    trained = {**state, "log": state["log"] + 1}
    with pytest.raises(OptionError, match=r"'norms', 'total' are not made from the state_dict.*give their values too"):
        refgrad.write_back(made, trained, found)
    written = values(refgrad.write_back(made, {**trained, "norms": norms, "total": trained["log"].sum()}, found))
    assert written["total"] == trained["log"].sum()
    assert written["log"].tolist() == trained["log"].tolist()


def test_what_is_no_state_of_this_model_is_refused() -> None:
    made = exported("plain", STATES["plain"])
    with pytest.raises(OptionError, match="No initializer of the model has the values of a tensor in the state_dict"):
        refgrad.weights(made, {"w": normal(3, 4)})
    with pytest.raises(OptionError, match="state_dict is a mapping of names to arrays"):
        refgrad.weights(made, [normal(3, 4)])  # type: ignore[arg-type]
    with pytest.raises(InvalidModelError, match="no initializer 'val_1' of shape"):
        refgrad.write_back(exported("qkv", STATES["qkv"]), {}, refgrad.weights(made))
    with pytest.raises(OptionError, match=r"what refgrad\.weights returned, not dict"):
        refgrad.write_back(made, {}, {})  # type: ignore[arg-type]


def test_a_value_that_did_not_change_leaves_its_tensor_as_it_is() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> m (float[N, 2] x) => (float[N, 2] y) '
        "<float[2, 2] w = {1, 2, 3, 4}, float[2] b = {5, 6}> { z = MatMul(x, w) y = Add(z, b) }"
    )
    w, b = model.graph.initializer
    assert w.float_data  # not the raw bytes that a new value is written as
    written = refgrad.write_back(model, {"w": np.float32([[1, 2], [3, 4]]), "b": np.float32([5, 7])})
    assert written.graph.initializer[0].SerializeToString() == w.SerializeToString()
    assert not written.graph.initializer[1].HasField("doc_string")
    b.doc_string = ""
    assert refgrad.write_back(model, {"b": np.float32([5, 7])}).graph.initializer[1].HasField("doc_string")
    zero = refgrad.write_back(model, {"w": np.float32([[1, 2], [3, -0.0]])})
    assert refgrad.write_back(zero, {"w": np.float32([[1, 2], [3, 0.0]])}) != zero  # 0 and -0 differ


def test_external_data_is_read_and_stays(tmp_path: Path) -> None:
    state = STATES["plain"]
    path = tmp_path / "m.onnx"
    onnx.save(exported("plain", state), path, save_as_external_data=True, location="m.data", size_threshold=0)
    data = (tmp_path / "m.data").read_bytes()
    found = refgrad.weights(path, state)
    assert {key: weight.how for key, weight in found.items()} == HOW["plain"]
    written = refgrad.write_back(path, {"w": state["w"] + 1}, found)
    assert [tensor.name for tensor in written.graph.initializer if tensor.external_data] == ["b", "val_2"]
    assert (tmp_path / "m.data").read_bytes() == data
    onnx.save(written, tmp_path / "n.onnx")
    np.testing.assert_array_equal(values(onnx.load(tmp_path / "n.onnx"))["val_1"], (state["w"] + 1).T)
    with pytest.raises(InvalidModelError, match="Give the path of the model"):
        refgrad.weights(onnx.load(path, load_external_data=False), state)


def test_the_command_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {**STATES["folded"], "unused": normal(3)}
    onnx.save(exported("folded", state), tmp_path / "m.onnx")
    np.savez(tmp_path / "s.npz", **state)  # type: ignore[arg-type]
    words = ["weights", str(tmp_path / "m.onnx")]
    assert main(words) == 0
    assert "By kind: 2 parameter" in capsys.readouterr().out
    assert main([*words, "--state-dict", str(tmp_path / "s.npz"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trainable"] == ["conv.weight", "conv.weight_bias"]
    assert found["missing"] == ["unused"]
    assert found["initializers"][1] == {
        "initializer": "conv.weight_bias",
        "kind": "parameter",
        "type": "float[3]",
        "read by": "Conv:2",
        "made of": ["conv.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"],
        "how": "folded",
    }
    assert main([*words, "--state-dict", str(tmp_path / "s.npz")]) == 0
    out = capsys.readouterr().out
    assert re.search("made of +how", out)
    assert main(words) == 0
    assert "made of" not in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["initializers"][0]) == {"initializer", "kind", "type", "read by"}
    assert main([*words, "--state-dict", str(tmp_path / "s.npz")]) == 0
    out = capsys.readouterr().out
    assert "no initializer is made from: unused" in out
    for name, content, said in (
        ("none.npz", None, "There is no file"),
        ("text.npz", b"text", "cannot be read as the state_dict() of a module"),
        ("header.safetensors", b"\xff" * 64, "cannot be read as the state_dict() of a module"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        if name != "none.npz":
            pytest.importorskip("safetensors")
        assert main([*words, "--state-dict", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err


def test_a_state_in_a_file_of_safetensors(tmp_path: Path) -> None:
    file = tmp_path / "s.safetensors"
    tensors = {"w": normal(3, 4), "half": normal(2).astype(ml_dtypes.bfloat16), "n": np.array(7)}
    header, data = {}, b""
    for (name, value), kind in zip(tensors.items(), ("F32", "BF16", "I64"), strict=True):
        header[name] = {"dtype": kind, "shape": value.shape, "data_offsets": [len(data), len(data) + value.nbytes]}
        data += value.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    pytest.importorskip("safetensors")
    for name, value in read_state_dict(file).items():
        np.testing.assert_array_equal(value, tensors[name], strict=True)


def test_tensors_without_an_element_and_without_a_number() -> None:
    empty, nan = np.zeros((0, 3), np.float32), np.full(3, np.nan, np.float32)
    made = model(
        "g (float[N, 3] x) => (float[N, 3] y) { p = MatMul(x, k) q = Add(p, b) y = Concat <axis = 0> (q, none) }",
        k=normal(3, 3),
        b=nan,
        none=empty,
    )
    state = {"w": values(made)["k"].T, "nan": nan, "empty": empty}
    for given in (None, state):
        assert {name: one.kind for name, one in refgrad.weights(made, given).items()} == {
            **dict.fromkeys("kb", "parameter"),
            "none": "constant",
        }
    assert refgrad.weights(made, state)["k"].how == "transposed"


# Patterns in wrt.
LAYERS = model(
    'g (float[N, 3] x) => (float[N, 3] y) { p = Gemm(x, "body.w", "body.b") y = Gemm(p, "head.w", "head.b") }',
    **{"body.w": normal(3, 3), "body.b": normal(3), "head.w": normal(3, 3), "head.b": normal(3)},
)


def outputs(made: ModelProto) -> list[str]:
    return [value.name for value in made.graph.output]


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (["head.*"], ["head.w", "head.b"]),
        (["*.b", "head.?"], ["body.b", "head.b", "head.w"]),
        (["head.[w]", "x"], ["head.w", "x"]),
        (["*.w", "head.w"], ["body.w", "head.w"]),
    ],
)
def test_patterns_stand_for_the_names_that_they_match(wrt: list[str], expected: list[str]) -> None:
    assert outputs(refgrad.gradient(LAYERS, wrt)) == [f"{name}_grad" for name in expected]
    assert list(refgrad.preflight(LAYERS, wrt).wrt) == expected
    assert outputs(refgrad.hvp(LAYERS, wrt)) == [f"{name}_hvp" for name in expected]


def test_a_name_that_is_there_is_no_pattern() -> None:
    made = model(
        'g (float[2] x) => (float[2] y) { p = Mul(x, "w[0]") y = Mul(p, w0) }', **{"w[0]": normal(2), "w0": normal(2)}
    )
    assert outputs(refgrad.gradient(made, ["w[0]"])) == ["w[0]_grad"]


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"pattern 'tail\.\*' in wrt matches no float input.*'head.w'"):
        refgrad.gradient(LAYERS, ["tail.*"])


def test_what_is_no_list_of_names_is_refused() -> None:
    for wrt in ("head.*", ["head.*", 3], ["head.*", ["x"]]):
        with pytest.raises(OptionError, match="wrt is a list of names"):
            refgrad.gradient(LAYERS, wrt)  # type: ignore[arg-type]


def test_the_parameters_are_a_wrt() -> None:
    gradient = refgrad.gradient(LAYERS, refgrad.weights(LAYERS).trainable)
    x = normal(2, 3)
    results = get_backend("numpy").prepare(gradient).run({"x": x, "y_grad": np.ones((2, 3), np.float32)})
    np.testing.assert_allclose(results["head.b_grad"], [2, 2, 2])

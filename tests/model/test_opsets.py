"""Models of the opsets from 7 to 15: what they compute once they are converted, and their gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from checking import assert_gradient
from onnx import ModelProto, TensorProto, helper, parser

from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.opsets import ELEMENTS, cases
from refgrad.errors import BackendError, InvalidModelError
from refgrad.model.graph import MIN_OPSET
from refgrad.model.normalise import normalise
from refgrad.model.upgrading.upgrade import FIXES

pytestmark = pytest.mark.slow

CASES = list(cases())
X = np.array([[1, -2], [3, 4]], np.float32)


def converted(model: ModelProto) -> ModelProto:
    found = normalise(model).model
    assert found.opset_import[0].version == MIN_OPSET
    return found


def old(text: str, opset: int, extra: str = "") -> ModelProto:
    return parser.parse_model(f'<ir_version: 7, opset_import: ["": {opset}{extra}]> {text}')


def assert_same_values(model: ModelProto, feeds: dict[str, np.ndarray]) -> None:
    """What ONNX Runtime computes of the model is what the executors compute of the converted one."""
    if "ort-cpu" not in available():
        pytest.skip("needs ONNX Runtime")
    expected = get_backend("ort-cpu").prepare(model).run(feeds)
    for name in ("ort-cpu", "numpy"):
        got = get_backend(name).prepare(converted(model)).run(feeds)
        for output, value in expected.items():
            if not output.startswith("mask"):  # in inference 0 there, 1 here; nothing says which
                assert got[output].dtype == value.dtype
                np.testing.assert_allclose(
                    got[output], value, rtol=1e-3 if value.dtype == np.float16 else 2e-5, atol=1e-6
                )


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax", "BatchNormalization"])
def test_the_interpreter_runs_the_versions_that_meant_something_else(op_type: str) -> None:
    pytest.importorskip("onnxruntime")
    for case in CASES:
        if case.operator == op_type and "-unknown-" not in case.name:
            expected, got = (get_backend(name).prepare(case.model).run(case.feeds) for name in ("ort-cpu", "numpy"))
            np.testing.assert_allclose(*(next(iter(x.values())) for x in (got, expected)), rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conversion_keeps_the_values(case: Case) -> None:
    """ONNX Runtime has operators of these opsets itself, in most types."""
    try:
        get_backend("ort-cpu").prepare(case.model).run(case.feeds)
    except BackendError:
        pytest.skip("ONNX Runtime does not run it in this type")
    assert_same_values(case.model, dict(case.feeds))


@pytest.mark.matrix
@pytest.mark.parametrize("case", [case for case in CASES if case.dtype], ids=str)
def test_gradient_agrees_with_differences(case: Case) -> None:
    assert_gradient(replace(case, model=converted(case.model)), directions=1, runtime=False)


def test_every_fix_has_a_case() -> None:
    tested = {(case.model.graph.node[k].op_type, case.model.opset_import[0].version) for case in CASES for k in (0, -1)}
    tested |= {(n.op_type, c.model.opset_import[0].version) for c in CASES for n in c.model.graph.node}
    for fix in FIXES:
        if fix.op_type != "Scan":  # refused
            assert any((fix.op_type, opset) in tested for opset in range(fix.since, fix.until + 1)), fix


def test_training_in_five_outputs() -> None:
    """Exporters left saved_mean and saved_var without a reader."""
    case = node_case("BatchNormalization", *(np.float32([1, 2, 4]).reshape(3, 1), *np.ones((4, 1), np.float32)), opset=14,
                     outputs=3, training_mode=1)  # fmt: skip
    model = ModelProto()
    model.CopyFrom(case.model)
    model.opset_import[0].version = 9
    node = model.graph.node[0]
    del node.attribute[:]
    node.output.extend(["saved_mean", "saved_var"])
    new, before = (get_backend("numpy").prepare(m).run(case.feeds) for m in (case.model, converted(model)))
    for name, value in new.items():
        np.testing.assert_array_equal(before[name], value)
    read = model.graph.output.add()
    read.CopyFrom(helper.make_tensor_value_info("saved_mean", TensorProto.FLOAT, [1]))
    with pytest.raises(InvalidModelError, match=r"'node' \(BatchNormalization of opset 9\).*saved_mean.*are read"):
        normalise(model)


def test_statistics_per_element_are_not_trained() -> None:
    case = node_case("BatchNormalization", *ELEMENTS, opset=7, outputs=5, spatial=0)
    del case.model.graph.node[1:], case.model.graph.output[1:]  # nobody reads the others
    with pytest.raises(InvalidModelError, match=r"'node' \(BatchNormalization of opset 7\).*spatial=0"):
        normalise(case.model)


@pytest.mark.parametrize("directions", ["", ", directions = [1, 0]"])
def test_the_scan_of_opset_8_runs_over_the_batch(directions: str) -> None:
    text = f"""g (float[2,3,2] x, float[2,3] w, float[2,2] h0) => (float[2,2] h, float[2,3,2] y) {{
        h, y = Scan ("", h0, x, w) <num_scan_inputs = 2{directions}, body = b (float[2] s, float[2] e, float v)
            => (float[2] t, float[2] o) {{ a = Mul (s, v) t = Add (a, e) o = Mul (t, e) }}> }}"""
    rng = np.random.default_rng(0)
    shapes = {"x": (2, 3, 2), "w": (2, 3), "h0": (2, 2)}
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    model = old(text, 8)
    assert_same_values(model, feeds)
    assert_gradient(Case("scan", model, feeds))


def test_the_scan_of_opset_8_of_shorter_sequences_is_refused() -> None:
    text = """g (float[2,3,2] x, float[2,2] h0, int64[2] n) => (float[2,2] h, float[2,3,2] y) {
        h, y = Scan (n, h0, x) <num_scan_inputs = 1, body = b (float[2] s, float[2] e) => (float[2] t, float[2] o) {
            t = Add (s, e) o = Mul (t, e) }> }"""
    with pytest.raises(InvalidModelError, match=r"Node 'h' \(Scan of opset 8\).*sequence_lens.*opset 9 or later"):
        normalise(old(text, 8))


def test_sparse_constants_are_refused() -> None:
    model = old("g (float[2] x) => (float[2] y) { y = Add (x, w) }", 11)
    values, indices = helper.make_tensor("w", 1, [1], [3.0]), helper.make_tensor("i", 7, [1], [1])
    sparse = helper.make_sparse_tensor(values, indices, [2])
    constant = ModelProto()
    constant.CopyFrom(model)
    constant.graph.node.insert(0, helper.make_node("Constant", [], ["w"], name="c", sparse_value=sparse))
    with pytest.raises(InvalidModelError, match=r"node 'c' \(Constant\) stands in the way.*Sparse"):
        normalise(constant)
    model.graph.sparse_initializer.append(sparse)
    with pytest.raises(InvalidModelError, match=r"opset 11 and sparse initializers.*Make them dense"):
        normalise(model)


@pytest.mark.parametrize(
    "text",
    [
        """g (float[2,2] x, bool c) => (float[2,2] y) { y = If (c) <
            then_branch = a () => (float[2,2] u) { u = Hardmax <axis = 0> (x) },
            else_branch = b () => (float[2,2] v) { s = ReduceSum <axes = [0]> (x) v = Add (x, s) }> }""",
        """g (float[2,2] x, bool c) => (float[2,2] y) { y = Loop ("", c, x) <
            body = b (int64 i, bool k, float[2,2] h) => (bool m, float[2,2] z) {
                three = Constant <value = int64 {3}> () m = Less (i, three) s = Softmax <axis = 0> (h) z = Add (s, x) }> }""",
        """g (float[2,2] x, bool c) => (float[2,2] y) { z, w = Scan (x, x) <num_scan_inputs = 1,
            body = b (float[2,2] s, float[2] e) => (float[2,2] t, float[2] o) {
                t = Neg (s) q = Softmax <axis = 0> (s) p = ReduceMax <axes = [0]> (q)
                r = Squeeze <axes = [0]> (p) o = Add (r, e) }> y = Add (z, w) }""",
    ],
    ids=["If", "Loop", "Scan"],
)
def test_subgraphs(text: str) -> None:
    for chosen in (True, False):
        assert_same_values(old(text, 11), {"x": X, "c": np.array(chosen)})


def test_other_domains_and_functions() -> None:
    text = """g (float[2,2] x) => (float[2,2] y) {
        a = ai.onnx.ml.Scaler <offset = [1.0], scale = [2.0]> (x) y = local.f (a) }"""
    function = '<opset_import: ["": 12], domain: "local"> f (u) => (v) { v = Hardmax <axis = 0> (u) }'
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 12, "ai.onnx.ml": 2, "local": 1]> {text} {function}'
    )
    got = get_backend("numpy").prepare(converted(model)).run({"x": X})["y"]
    np.testing.assert_array_equal(got, [[0, 0], [0, 1]])
    assert {o.domain: o.version for o in normalise(model).model.opset_import}["ai.onnx.ml"] == 2


def test_a_function_of_an_opset_with_another_meaning_is_refused() -> None:
    text = "g (float[2,2] x) => (float[2,2] y) { y = local.f (x) }"
    function = '<opset_import: ["": 15], domain: "local"> f (u) => (v) { v = Softmax <axis = 0> (u) }'
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 12, "local": 1]> {text} {function}')
    with pytest.raises(InvalidModelError, match=r"Softmax.*not compatible"):
        normalise(model)


def test_the_converter_takes_no_name_that_the_model_has() -> None:
    text = """g (float[2,2] x) => (float[2,2] y, float[2,2] z) {
        y_intermediate = Exp (x) y = Softmax <axis = 0> (y_intermediate) z = Neg (y_intermediate) }"""
    model = old(text, 11)
    onnx.checker.check_model(converted(model))
    assert_same_values(model, {"x": X})

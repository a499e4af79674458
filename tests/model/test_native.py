"""One door leads to onnx's C++, and refuses models that onnx would not survive. In these tests it runs in a worker."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.shape_inference
import pytest
from door import asked
from onnx import AttributeProto, ModelProto, parser

import refgrad
from refgrad.backends import get_backend
from refgrad.errors import BackendError, InvalidModelError, RefgradError
from refgrad.model import native
from refgrad.model.checks.malformed import explained
from refgrad.worker import Worker

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "refgrad" / "model" / "native.py"
ALONE = ROOT / "conformance" / "tools" / "exporting" / "runners"  # what is copied into packages that do without refgrad
BEHIND = {
    *("checker", "compose", "hub", "inliner", "onnx_cpp2py_export", "parser", "printer", "reference"),
    *("shape_inference", "utils", "version_converter"),
}
METHODS = {
    *("_infer_node_outputs", "get_context_dependent_function", "get_context_dependent_function_with_opset_version"),
    *("load", "load_model", "ReferenceEvaluator"),
}
SAFE = {"onnx.reference.op_run", "onnx.reference.ops"}  # classes in Python


def _past_the_door(code: str) -> Iterator[str]:
    """The functions of onnx's C++ that a module imports or calls."""
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "onnx":
            names = [] if node.module in SAFE else [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
            if node.attr.startswith(("get_context_dependent", "_infer_node")):
                yield names[0]
        for name in names:
            parts = name.split(".")
            if parts[0] == "onnx" and len(parts) > 1 and (parts[1] in BEHIND or parts[-1] in METHODS):
                yield name


@pytest.mark.parametrize("top", ["refgrad", "backends", "conformance"])
def test_no_other_module_calls_onnx_for_what_the_door_does(top):
    for file in sorted((ROOT / top).rglob("*.py")):
        if file != DOOR and ALONE not in file.parents:
            assert not list(_past_the_door(file.read_text())), f"{file.relative_to(ROOT)}: call refgrad.model.native"


@pytest.mark.parametrize(
    "code",
    [
        "import onnx.checker",
        "from onnx import shape_inference",
        "from onnx.inliner import inline_local_functions",
        "import onnx\nonnx.version_converter.convert_version(model, 21)",
        "schema.get_context_dependent_function(node, types)",
        "import onnx.onnx_cpp2py_export.checker as C",
        "onnx.load(path)",
    ],
)
def test_a_way_past_the_door_is_found(code):
    assert list(_past_the_door(code))


def _model(text: str, opset: int = 17) -> ModelProto:
    imports = f'["": {opset}, "c": 1, "l": 1, "ai.onnx.ml": 4]'
    return parser.parse_model(f"<ir_version: 8, opset_import: {imports}> {text}")


HIDDEN = {  # an axis that no tensor has, in an attribute that onnx reads although its type says something else
    "a number in a list": "g (float[2] x, float[2] s) => (float[2] y) { y = LayerNormalization<axis=4294967296>(x, s) }",
    "a body that says it is a number": """g (bool c, float[2] x) => (float[2] y) { y = If(c) <
        then_branch = t () => (float[2] u) { u = LayerNormalization<axis=4294967296>(x, x) },
        else_branch = e () => (float[2] v) { v = Identity(x) }> }""",
}


@pytest.mark.parametrize("name", HIDDEN)
def test_onnx_reads_a_field_whatever_the_type_says(name):
    model = _model(HIDDEN[name])
    for attribute in model.graph.node[0].attribute:
        attribute.type = AttributeProto.INTS
    with Worker(seconds=60) as worker:
        assert all("Export the model again" in text for text in worker.call(asked, model)[:2])


KNOWN = {  # these operators are inferred as ever where their inputs are known
    "in a row": "g (float[2,3] d, int64[2,1] i, int64[4,2] k) => (float[4] z) { y = GatherND(d, i) z = GatherND(y, k) }",
    "of an operator": "g (float[2,2] x) => (float[2,2] y) { h = Relu(x) e = EyeLike<dtype=1>(h) y = Mul(e, x) }",
    "of unknown size": "g (float[2,3] d, int64[2,N] i) => (float[K,M] y) { y = GatherND(d, i) }",
    "in a body": """g (float[2,3] d, int64[2,1] i, bool c) => (float[2,3] y) { y = If(c) <
        then_branch = t () => (float[2,3] u) { u = GatherND(d, i) },
        else_branch = e () => (float[2,3] v) { v = Identity(d) }> }""",
    "in a function": """g (float[2,3] d, int64[2,1] i) => (float[2,3] z) { y = l.f(d, i) z = Relu(y) }
        <domain: "l", opset_import: ["": 17]> f (d, i) => (b) { b = GatherND(d, i) }""",
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_onnx_infers_by_itself_is_inferred(name):
    model = _model(KNOWN[name])
    assert native.infer_shapes(model) == onnx.shape_inference.infer_shapes(model)


def test_nodes_come_back_as_they_were():
    model = _model("g (float[2,2] x) => (float[2,2] y) { h = c.Unheard(x) e = EyeLike<dtype=1>(h) y = Mul(e, x) }")
    with Worker(seconds=60) as worker:
        for made in (worker.call(native.infer_shapes, model), worker.call(native.convert_version, model, 21)):
            assert [(n.domain, n.op_type) for n in made.graph.node] == [("c", "Unheard"), ("", "EyeLike"), ("", "Mul")]
            assert {one.domain for one in made.opset_import} == {one.domain for one in model.opset_import}


DEEP = {
    "types": f"g ({'seq(' * 100_000}float{')' * 100_000} x) => (float y) {{ y = Identity(x) }}",
    "bodies": f"""g (bool c) => (float y) {{ {"z = If(c) <then_branch = g () => (float y) {" * 100_000}
        y = Identity(c) {"}>" * 100_000} }}""",
}


@pytest.mark.parametrize("name", DEEP)
def test_brackets_do_not_lie_too_deep(name, tmp_path):
    file = tmp_path / "deep.onnxtxt"
    file.write_text(f'<ir_version: 8, opset_import: ["": 17]> {DEEP[name]}')
    with Worker(seconds=60) as worker:
        assert "brackets lie within each other" in worker.call(_refusal, file)


def _refusal(file: Path) -> str:
    try:
        refgrad.gradient(file)
    except InvalidModelError as error:
        return str(error)
    return ""


def test_brackets_in_texts_do_not_count():
    text = "g (string x) => (string y) { y = StringConcat(x, x) }"
    model = _model(text, 20)
    model.doc_string = "(" * 5000
    assert native.parse_model(native.to_text(model)).graph.node[0].op_type == "StringConcat"


LIMITED = {
    "an axis": (
        "g (float[2] x, float[2] w) => (float[2] y) { y = LayerNormalization<axis=9223372036854775807>(x, w) }",
        17,
    ),
    "outputs": ("g (float[7] x) => (float[2] a) { a, b, c, d, e, f, h = Split<num_outputs=4>(x) }", 18),
    "an equation": ('g (float[2] x) => (float[2] y) { y = Einsum<equation="i.">(x) }', 17),
    "a permutation": ("g (float[2,3] x) => (float[3,2] y) { y = Transpose<perm=[0, 9223372036854775807]>(x) }", 17),
    "batches": (
        "g (float[2,3] x, int64[2,1] i) => (float[N] y) { y = GatherND<batch_dims=-9223372036854775807>(x, i) }",
        17,
    ),
    "windows": ("g (float[1,1,4] x) => (float[1,1,4] y) { y = MaxPool<kernel_shape=[9223372036854775807]>(x) }", 17),
    "in a function": (
        """g (float[2,3] x) => (float[2,3] y) { y = l.f<k=9223372036854775807>(x) }
        <domain: "l", opset_import: ["": 17]> f<k>(a) => (b) { b = Softmax<axis: int = @k>(a) }""",
        17,
    ),
}


def _run(text: str, opset: int, limit: int | None) -> str:
    model = _model(text, opset)
    feeds = {
        value.name: np.ones([d.dim_value for d in value.type.tensor_type.shape.dim], "q" if value.name == "i" else "f")
        for value in model.graph.input
    }
    try:
        get_backend("numpy").prepare(model, max_memory=limit).run(feeds)
    except RefgradError as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_of_memory_ends_no_process(name):
    with Worker(seconds=60) as worker:
        without = worker.call(_run, *LIMITED[name], None)
        assert without == ("InvalidModelError" if name == "in a function" else "BackendError")
        assert worker.call(_run, *LIMITED[name], 1 << 29) == without


def _explained(model: ModelProto) -> str:
    @explained
    def broken(given: ModelProto) -> None:
        raise KeyError("whatever")

    try:
        broken(model)
    except InvalidModelError as error:
        return str(error)
    return ""


def test_looking_for_the_reason_of_an_error_is_no_worse_than_the_error():
    with Worker(seconds=60) as worker:
        assert "no tensor has this axis" in worker.call(_explained, _model(LIMITED["an axis"][0]))


def test_a_scan_of_more_inputs_than_it_has_takes_no_memory():
    model = _model(
        "g (float[3,2] x) => (float[3,2] y) { y = Scan<num_scan_inputs=1099511627776, "
        "body = b (float[2] s) => (float[2] t) { t = Tanh(s) }>(x) }"
    )
    with pytest.raises(InvalidModelError, match="has 1 inputs; expected at least 1099511627776"):
        refgrad.cost(model)


def test_a_run_of_such_a_scan_takes_none_either():
    model = _model(
        "g (float[3,2] x) => (float[3,2] y) { y = Scan<num_scan_inputs=1099511627776, "
        "body = b (float[2] s) => (float[2] t) { t = Tanh(s) }>(x) }"
    )
    with pytest.raises(BackendError, match="num_scan_inputs is 1099511627776, and the node has 1 inputs"):
        get_backend("numpy").prepare(model).run({"x": np.ones((3, 2), np.float32)})


@pytest.mark.parametrize(("sizes", "survives"), [("[4]", True), ("[-5]", False)])
def test_a_slice_of_an_expanded_size(sizes: str, survives: bool) -> None:
    """An ordinary model is inferred as it is. The result of a Slice that onnx would die of is not known."""
    model = native.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[1] x) => (float[] z) {{ n = Constant<value_ints={sizes}>() '
        "y = Expand(x, n) s = Constant<value_ints=[0]>() e = Constant<value_ints=[2]>() t = Slice(y, s, e) z = Neg(t) }"
    )
    known = {value.name for value in native.infer_shapes(model).graph.value_info}
    assert ("t" in known) is survives
    assert "y" in known

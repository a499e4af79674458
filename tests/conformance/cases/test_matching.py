"""A known bug is named for the nodes that are like the one that shows it, and for no others."""

from __future__ import annotations

from typing import Any

import onnx.parser
import pytest
from onnx import ModelProto

from refgrad.conformance.known.bugs import known_bugs, matching
from refgrad.conformance.known.bugs.bug import ORT, REFERENCE, VERSIONS
from refgrad.conformance.known.bugs.builders import builder_bugs
from refgrad.conformance.known.bugs.matching import bugs_of, is_about

pytestmark = pytest.mark.interpreter

ROUNDED = "aligns corners by the rounded length where a scale gives the length"
SCALES = 'mode = "linear", coordinate_transformation_mode = "align_corners"'


@pytest.fixture(autouse=True)
def releases(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnx.reference": f"onnx {VERSIONS[REFERENCE]}", "ort-cpu": f"onnxruntime {VERSIONS[ORT]}"}
    monkeypatch.setattr(matching.executors, "version", versions.get)


def model_of(text: str) -> ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')


def found(executor: str, model: ModelProto, is_error: bool = False) -> list[str]:
    return [bug.fault for bug in bugs_of(executor, model.graph.node[0], model, is_error)]


@pytest.mark.parametrize(
    ("attributes", "inputs", "expected"),
    [
        (SCALES, "X, , s", [ROUNDED]),
        (f'{SCALES}, cubic_coeff_a = -0.75, exclude_outside = 0, nearest_mode = "round_prefer_floor"', "X, , s", [ROUNDED]),
        (f"{SCALES}, exclude_outside = 1", "X, , s", []),
        (f"{SCALES}, antialias = 1", "X, , s", []),
        (SCALES.replace("align_corners", "asymmetric"), "X, , s", []),
        (SCALES.replace("linear", "cubic"), "X, , s", []),
        (SCALES, "X, , , z", []),
    ],
)  # fmt: skip
def test_a_known_bug_has_the_same_attributes_and_inputs(attributes: str, inputs: str, expected: list[str]) -> None:
    model = model_of(
        f"g (float[1,2] X, float[2] s, int64[2] z) => (float[] Y) {{ Y = Resize <{attributes}> ({inputs}) }}"
    )
    assert found("ort-cpu", model) == expected
    assert not found("ort-cpu", model, is_error=True)
    assert not found("my.module:Class", model)


def test_a_known_bug_has_the_same_types() -> None:
    text = f"g (float[1,2] X, float[2] s) => (float[] Y) {{ Y = Resize <{SCALES}> (X, , s) }}"
    assert not found("ort-cpu", model_of(text.replace("float[1,2]", "float16[1,2]")))


def test_another_release_has_no_known_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching.executors, "version", lambda name: "onnxruntime 99.0")
    assert not found(
        "ort-cpu", model_of(f"g (float[1,2] X, float[2] s) => (float[] Y) {{ Y = Resize <{SCALES}> (X, , s) }}")
    )


@pytest.mark.parametrize(("groups", "expected"), [(1, []), (2, ["fails on groups"]), (4, ["fails on groups"])])
def test_sizes_and_biases_do_not_count(groups: int, expected: list[str]) -> None:
    attributes = f"group = {groups}, kernel_shape = [3], pads = [0, 0], strides = [1]"
    text = f"g (float[1,4,9] X, float[4,1,3] W, float[4] B) => (float[] Y) {{ Y = ConvTranspose <{attributes}> (X, W, B) }}"
    assert found("onnx.reference", model_of(text), is_error=True) == expected


def test_each_known_bug_is_about_its_own_node() -> None:
    bugs: tuple[Any, ...] = (*known_bugs(), *builder_bugs())
    for bug in bugs:
        assert is_about(bug, next(node for node in bug.model.graph.node if node.op_type == bug.operator), bug.model)


def test_a_dispute_says_who_computes_what() -> None:
    [disputed] = [bug for bug in known_bugs() if bug.disputed]
    assert (disputed.system, disputed.fault) == (ORT, ROUNDED)
    assert "ONNX Runtime and torch" in disputed.disputed
    assert "onnx/onnx#2462" in disputed.disputed

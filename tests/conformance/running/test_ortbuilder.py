"""ONNX Runtime's builders behind a process: what they make, and every way in which they make nothing."""

from __future__ import annotations

import onnx
import pytest
from onnx import ModelProto

from refgrad.derivatives import ortbuilder
from refgrad.derivatives.ortbuilder import Builders
from refgrad.errors import BuilderError

needs_training = pytest.mark.skipif(not ortbuilder.available(), reason="needs onnxruntime-training")


def model(
    nodes: str, inputs: str = "float[N, 3] x", outputs: str = "float[N, 3] y", constants: str = "float[3] w = {1, 2, 3}"
) -> ModelProto:
    text = f'<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => ({outputs}) <{constants}> {nodes}'
    return onnx.parser.parse_model(text)


PRODUCT = model("{ [n] y = Mul(x, w) }")


def names(made: ModelProto) -> tuple[list[str], list[str]]:
    return [v.name for v in made.graph.input], [v.name for v in made.graph.output]


def operators(made: ModelProto) -> list[str]:
    return [node.op_type for node in made.graph.node]


@pytest.mark.skipif(ortbuilder.available(), reason="needs an onnxruntime without builders")
def test_without_a_builder_the_error_says_what_to_install():
    with pytest.raises(BuilderError, match=r"onnxruntime-training-cpu==1\.19\.2") as raised:
        ortbuilder.build_raw(PRODUCT, ["x"], "y")
    assert raised.value.verdict == "missing"


@needs_training
class TestBuilders:
    def test_raw_has_one_input_for_the_cotangent(self):
        made = ortbuilder.build_raw(PRODUCT, ["x", "w"], "y")
        assert names(made)[0] == ["x", "y_grad"]
        assert set(names(made)[1]) == {"y", "x_grad", "w_grad"}
        assert "YieldOp" not in operators(made)

    def test_module_makes_inputs_of_what_is_trained_and_keeps_yield(self):
        made = ortbuilder.build_module(PRODUCT, ["x"], ["w"])
        assert names(made) == (["x", "w"], ["x_grad", "w_grad"])
        assert operators(made).count("YieldOp") == 1

    def test_module_differentiates_by_what_is_asked_for(self):
        two = model("{ [n] y = Mul(x, z) }", "float[N, 3] x, float[N, 3] z", constants="")
        assert names(ortbuilder.build_module(two, ["z"], [])) == (["x", "z"], ["z_grad"])

    def test_many_in_one_process(self):
        with Builders() as builders:
            first = builders.raw(PRODUCT, ["x"], "y")
            process = builders.worker._process
            assert builders.raw(PRODUCT, ["x"], "y") == first
            assert operators(builders.module(PRODUCT, ["x"], [])).count("YieldOp") == 1
            assert builders.worker._process is process

    def test_a_refusal_leaves_the_process_alive(self):
        with Builders() as builders:
            with pytest.raises(BuilderError, match="gradient builder has not been registered") as raised:
                builders.raw(model("{ [n] y = Softplus(x) }"), ["x"], "y")
            assert raised.value.verdict == "refused"
            process = builders.worker._process
            builders.raw(PRODUCT, ["x"], "y")
            assert builders.worker._process is process

    def test_a_process_that_takes_too_long_is_stopped(self):
        with Builders(seconds=0.01) as builders:
            with pytest.raises(BuilderError, match=r"nothing came back after 0\.01 s") as raised:
                builders.raw(PRODUCT, ["x"], "y")
            assert raised.value.verdict == "timed out"

    def test_a_model_that_is_too_new_is_converted(self):
        new = onnx.parser.parse_model(
            '<ir_version: 11, opset_import: ["": 23]> g (float[N, 3] x) => (float[N, 3] y) { [n] y = Exp(x) }'
        )
        with Builders() as builders:
            assert operators(builders.raw(new, ["x"], "y")) == ["Exp", "Mul"]

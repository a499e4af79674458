"""Small models in onnx's own language, for the tests of the interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, parser


def parsed(text: str, opset: int = 21) -> onnx.ModelProto:
    """A model of `text`: inputs, outputs and nodes."""
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g {text}')


def undeclared(
    body: str, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ("y",), opset: int = 21
) -> onnx.ModelProto:
    """A model of the nodes in `body`, whose inputs are declared as `inputs` are, and whose outputs are not."""
    model = parsed(f"(float u) => (float v) {{ {body} }}", opset)
    del model.graph.input[:], model.graph.output[:]
    for name, value in inputs.items():
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    return model

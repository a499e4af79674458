"""A size that is only declared is counted where the gradient runs: no constant of the gradient has as many elements."""

from __future__ import annotations

from onnx import parser

import refgrad
from refgrad.worker import Worker

BILLION = 10**9
NODES = {
    "Attention": (
        23,
        "m (float[1,1,{n},8] x, float[1,1,{n},8] k) => (float[a,b,c,d] y) {{ y = Attention<is_causal=1>(x, k, k) }}",
    ),
    "AveragePool": (
        19,
        "m (float[1,1,{n},{n}] x) => (float[a,b,c,d] y) {{ y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x) }}",
    ),
    "Det": (22, "m (float[{n},{n}] x) => (float y) {{ y = Det(x) }}"),
    "DequantizeLinear": (
        21,
        "m (int8[{n}] x, float[{m}] s) => (float[a] y) {{ y = DequantizeLinear<axis=0, block_size=2>(x, s) }}",
    ),
    "LSTM": (
        22,
        "m (float[{n},1,2] x, float[1,4,2] w, float[1,4,1] r) => (float[a,b,c,d] y) {{ y = LSTM<hidden_size=1>(x, w, r) }}",
    ),
}


def _size(operator: str, size: int) -> int:
    opset, text = NODES[operator]
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text.format(n=size, m=size // 2)}')
    return refgrad.gradient(model).ByteSize()


def test_no_constant_has_as_many_elements():
    with Worker(seconds=60, room=1 << 28) as worker:
        for operator in NODES:
            assert worker.call(_size, operator, BILLION) < 1 << 20, operator

"""The releases of ONNX Runtime that the interpreter is compared with: others lack operators, or compute other things."""

from functools import cache

import numpy as np
import onnx.parser
import pytest

from refgrad.backends import get_backend
from refgrad.conformance.findings.finding import ORT, RELEASES, installed

RUNTIME = installed().get(ORT) in RELEASES[ORT]
WITHOUT = f"onnxruntime {' or '.join(RELEASES[ORT])} is not installed"
needs_runtime = pytest.mark.skipif(not RUNTIME, reason=WITHOUT)

PRODUCTS = ("ConvInteger", "MatMulInteger", "QGemm", "QLinearConv", "QLinearMatMul")


@cache
def overflows() -> bool:
    """Whether ONNX Runtime adds products of 8 bits in 16 here, which overflow: on processors without VNNI."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (uint8[4, 64] a, int8[64, 16] b) => (int32[4, 16] y) '
        "{ y = MatMulInteger(a, b) }"
    )
    feeds = {"a": np.full((4, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)}
    return bool((get_backend("ort-cpu").prepare(model).run(feeds)["y"] != 64 * 255 * 127).any())


def skip_products_that_overflow(op_type: str) -> None:
    """Skip a comparison of exact sums where ONNX Runtime's own are not exact."""
    if op_type in PRODUCTS and overflows():
        pytest.skip("ONNX Runtime's sums of products of 8 bits overflow on this processor")

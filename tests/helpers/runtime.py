"""The releases of ONNX Runtime that the interpreter is compared with: others lack operators, or compute other things."""

from collections.abc import Iterable
from functools import cache

import numpy as np
import onnx.parser
import pytest

from refgrad.backends import get_backend
from refgrad.conformance.known.bugs.bug import ORT, RELEASES, installed

RUNTIME = installed().get(ORT) in RELEASES[ORT]
WITHOUT = f"onnxruntime {' or '.join(RELEASES[ORT])} is not installed"
needs_runtime = pytest.mark.skipif(not RUNTIME, reason=WITHOUT)

PRODUCTS = frozenset(("ConvInteger", "MatMulInteger", "QGemm", "QLinearConv", "QLinearMatMul"))


def overflows(op_types: Iterable[str]) -> bool:
    """True if ONNX Runtime's sums in one of these operators are not exact here, and so no oracle."""
    return not PRODUCTS.isdisjoint(op_types) and _adds_in_16_bits()


@cache
def _adds_in_16_bits() -> bool:
    """True if products of 8 bits are added in 16, and overflow: on processors without VNNI."""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (uint8[4, 64] a, int8[64, 16] b) => (int32[4, 16] y) '
        "{ y = MatMulInteger(a, b) }"
    )
    feeds = {"a": np.full((4, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)}
    return bool((get_backend("ort-cpu").prepare(model).run(feeds)["y"] != 64 * 255 * 127).any())

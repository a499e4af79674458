"""Cases of ONNX Runtime's products of matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.activation import ACTIVATIONS


def cases() -> Iterator[Case]:
    """Every attribute and every optional input; static, symbolic and, where the operator works with them, unknown shapes."""
    floats = drawer()
    for shapes in SHAPES:
        yield case("GemmFastGelu", floats(2, 4), floats(4, 3), floats(3), shapes=shapes)
        for trans_a, trans_b in ((0, 0), (1, 0), (0, 1), (1, 1)):
            for batch in ((), (2,), (2, 3)) if shapes == "static" else ((2,),):
                a = floats(*batch, *((5, 4) if trans_a else (4, 5)))
                b = floats(*((3, 5) if trans_b else (5, 3)))
                yield case("FusedMatMul", a, b, shapes=shapes, transA=trans_a, transB=trans_b, alpha=0.5)
            if shapes != "unknown":
                a, b = floats(*((5, 2, 4) if trans_a else (4, 2, 5))), floats(*((3, 2, 5) if trans_b else (5, 2, 3)))
                options: dict[str, Any] = {"transBatchA": 1, "transBatchB": 1}
                yield case("FusedMatMul", a, b, shapes=shapes, transA=trans_a, transB=trans_b, **options)
        yield case("FusedMatMul", floats(5), floats(2, 5, 3), shapes=shapes)
        yield case("FusedMatMul", floats(2, 0, 5, 4), floats(5, 3), shapes=shapes, transA=1)
        yield case("TransposeMatMul", floats(5, 4), floats(5, 3), shapes=shapes, transA=1, alpha=2.0)
        for activation, parameters in ACTIVATIONS if shapes == "static" else ACTIVATIONS[:2]:
            named: dict[str, Any] = {} if activation is None else {"activation": activation}
            each = dict(zip(("activation_alpha", "activation_beta"), parameters or [], strict=False))
            yield case("FusedGemm", floats(2, 4), floats(4, 3), floats(3), shapes=shapes, **named, **each)
            form: dict[str, Any] = {"shapes": shapes, "activation": activation or "Relu"}
            yield case("FusedMatMulActivation", floats(2, 4), floats(4, 3), **form, **each)
        form = {"shapes": shapes, "transA": 1, "transB": 1, "alpha": 0.5}
        yield case(
            "FusedMatMulActivation", floats(2, 4, 2), floats(3, 4), activation="Softmax", activation_axis=1, **form
        )
        yield case("FusedMatMulActivation", floats(4), floats(4, 3), shapes=shapes, activation="LogSoftmax")
        yield case("FusedMatMulActivation", floats(0, 4), floats(4, 3), shapes=shapes, activation="Selu")
        selu: dict[str, Any] = {"activation": "Selu", "activation_alpha": 1.2, "activation_gamma": 0.9}
        yield case("FusedGemm", floats(2, 4), floats(4, 3), floats(3), shapes=shapes, **selu)
        yield case("FusedMatMulActivation", floats(2, 4), floats(4, 3), shapes=shapes, **selu)
        if shapes != "unknown":
            batches = {"transBatchA": 1, "transBatchB": 1, "activation": "Tanh"}
            yield case("FusedMatMulActivation", floats(4, 2, 5), floats(5, 2, 3), shapes=shapes, **batches)
        options = {"alpha": 0.5, "beta": -1.5, "transA": 1, "transB": 1, "activation": "Tanh"}
        yield case("FusedGemm", floats(4, 2), floats(3, 4), floats(2, 1), shapes=shapes, **options)
        matrices = floats(2, 3, 3) + 2 * np.eye(3, dtype=np.float32)
        for x in (matrices, matrices[0][::-1], floats(0, 2, 2), floats(2, 0, 0)):
            yield case("Inverse", x, shapes=shapes)
        for metric in ("sqeuclidean", "euclidean"):
            yield case("CDist", floats(3, 4), floats(2, 4), shapes=shapes, metric=metric)
        yield case("CDist", floats(0, 4), floats(2, 4), shapes=shapes)

"""Cases of ONNX Runtime's LSTM with attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.conformance.cases.microsoft import case, drawer

LENGTH, BATCH, WIDTH, HIDDEN, STEPS, DEPTH, EACH, LAYER = 2, 2, 2, 2, 3, 2, 2, 3
ENDS, SEEN = np.array([1, 2], np.int32), np.array([3, 2], np.int32)


def cases() -> Iterator[Case]:
    """Every optional input given and left out, every direction, other activations."""
    for shapes in SHAPES:
        yield _made(shapes=shapes)
        yield _made(
            "B", "P", "initial_h", "initial_c", "sequence_lens", "memory_seq_lens", "AW", shapes=shapes, input_forget=1
        )
        if shapes == "static":
            yield _made(shapes=shapes, count=2, direction="bidirectional")
            yield _made("AW", shapes=shapes, direction="reverse", clip=0.6, outputs=1)
            activations: dict[str, Any] = {
                "activations": ["HardSigmoid", "Affine", "ScaledTanh"],
                "activation_alpha": [0.3, 0.8, 1.2],
            }
            yield _made(shapes=shapes, **activations, activation_beta=[0.45, 0.1, 0.7])
            yield _made(
                "sequence_lens", shapes=shapes, activations=["Softplus", "Elu", "Softsign"], activation_alpha=[0.7]
            )
            yield _made(shapes=shapes, constant=["sequence_lens", "memory_seq_lens"])


def _made(
    *left_out: str,
    count: int = 1,
    **options: Any,
) -> Case:
    floats, of_a = drawer(11), DEPTH if "AW" in left_out else LAYER
    inputs: dict[str, tuple[int, ...] | np.ndarray] = {
        "X": (LENGTH, BATCH, WIDTH),
        "W": (count, 4 * HIDDEN, WIDTH + of_a),
        "R": (count, 4 * HIDDEN, HIDDEN),
        "B": (count, 8 * HIDDEN),
        "sequence_lens": ENDS,
        "initial_h": (count, BATCH, HIDDEN),
        "initial_c": (count, BATCH, HIDDEN),
        "P": (count, 3 * HIDDEN),
        "QW": (count, HIDDEN, EACH),
        "MW": (count, DEPTH, EACH),
        "V": (count, EACH),
        "M": (BATCH, STEPS, DEPTH),
        "memory_seq_lens": SEEN,
        "AW": (count, DEPTH + HIDDEN, LAYER),
    }
    given = [None if name in left_out else floats(*of) if isinstance(of, tuple) else of for name, of in inputs.items()]
    while given[-1] is None:
        given.pop()
    return case("AttnLSTM", *given, **{"outputs": 3, "hidden_size": HIDDEN} | options)

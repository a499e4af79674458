"""Cases of ONNX Runtime's LSTMs with attention and with quantized weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from refgrad.conformance.case import SHAPES, Case
from refgrad.microsoft.cases import case, drawer
from refgrad.microsoft.cases.qlinear import Drawer, rounding, with_constants

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
        quantized = list(_quantized(shapes))
        yield from quantized
        if shapes == "static":
            yield from with_constants(quantized)


def rare() -> Iterator[Case]:
    """Quantized weights and no sequence, and one of one step."""
    for batch in (0, 1):
        yield lstm("B", sizes=(1, 2, 2), batch=batch)


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


def _quantized(shapes: str) -> Iterator[Case]:
    """One sequence, except in two cases: ONNX Runtime quantizes as many states together as a thread has sequences."""
    every = "B", "sequence_lens", "initial_h", "initial_c", "P"
    yield lstm(shapes=shapes)
    yield lstm(*every, kind=np.int8, seed=1, shapes=shapes, input_forget=1)
    yield lstm(*every, per_column=True, seed=1, shapes=shapes, direction="reverse", quantize=("W", "R"))
    if shapes != "static":
        return
    yield lstm("B", "initial_c", batch=2)
    yield lstm(*every, batch=2, sizes=(3, 2, 2), seed=2, direction="bidirectional")
    yield lstm("B", "initial_h", kind=np.int8, per_column=True, direction="bidirectional")
    yield lstm("B", seed=3, outputs=1, clip=50.0)
    scaled: dict[str, Any] = {"activation_alpha": [0.3, 0.8, 1.2, 0.7], "activation_beta": [0.45, 0.1, 0.7]}
    names = ["HardSigmoid", "Affine", "ScaledTanh", "Sigmoid", "Elu", "Softsign"]
    yield lstm("B", "initial_h", seed=1, direction="bidirectional", activations=names, **scaled)
    yield lstm("P", activations=["Sigmoid", "Affine", "Tanh"], activation_alpha=[0.6], activation_beta=[0.2])


def lstm(
    *given: str,
    kind: Any = np.uint8,
    sizes: tuple[int, int, int] = (2, 2, 2),
    batch: int = 1,
    per_column: bool = False,
    quantize: Sequence[str] = (),
    seed: int = 0,
    **options: Any,
) -> Case:
    """A DynamicQuantizeLSTM over sizes (time, inputs, hidden) with the optional inputs in `given`.

    The seeds are such that no state comes near the middle between two bytes when something moves by a thousandth.
    """
    whole, (time, inputs, hidden) = Drawer(seed), sizes
    count = 2 if options.get("direction") == "bidirectional" else 1
    shape = (count, 4 * hidden) if per_column else (count,)
    zero = np.full(shape, 9 if kind is np.uint8 else 0, kind)
    optional = {
        "B": whole.floats(count, 8 * hidden),
        "sequence_lens": np.array([max(time - batch + 2 * k, 1) for k in range(batch)], np.int32),
        "initial_h": whole.floats(count, batch, hidden),
        "initial_c": whole.floats(count, batch, hidden),
        "P": whole.floats(count, 3 * hidden),
    }
    floats = [optional[name] if name in given else None for name in optional]
    weights = whole(kind, count, inputs, 4 * hidden), whole(kind, count, hidden, 4 * hidden)
    scales = [np.asarray(step * whole.scales(*shape), np.float32) for step in (0.1, 0.15)]
    settings: dict[str, Any] = {"outputs": 3, "hidden_size": hidden, "quantize": quantize} | options
    x = whole.floats(time, batch, inputs)
    return rounding("DynamicQuantizeLSTM", x, *weights, *floats, scales[0], zero, scales[1], zero, **settings)

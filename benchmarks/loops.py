"""The gradient of all weights of an LSTM that is written as a Loop or as a Scan, against the model alone.

    python benchmarks/loops.py

100 steps, 64 inputs and 128 units, with the batch known, or unknown as converters write it. Both are called in turn.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx.parser
from timing import alternate, save

import refgrad
from refgrad.backends import get_backend

STEPS, INPUTS, UNITS = 100, 64, 128
STEP = """
    p = MatMul(x, W) q = MatMul(h, R) r = Add(p, q) z = Add(r, b)
    zi, zf, zg, zo = Split<axis = 1, num_outputs = 4>(z)
    i = Sigmoid(zi) f = Sigmoid(zf) g = Tanh(zg) o = Sigmoid(zo)
    kept = Mul(f, c) new = Mul(i, g) c_new = Add(kept, new) t = Tanh(c_new) h_new = Mul(o, t) out = Identity(h_new)
"""


def model(operator: str, batch: str) -> onnx.ModelProto:
    """The model; `batch` is a number, or a name for a size that is not known."""
    state = f"float[{batch},{UNITS}]"
    results = f"{state} h_new, {state} c_new, {state} out"
    if operator == "Scan":
        body = f"({state} h, {state} c, float[{batch},{INPUTS}] x) => ({results}) {{ {STEP} }}"
        loop = f"end, c_end, all = Scan<num_scan_inputs = 1, body = step {body}>(start, start, steps)"
    else:
        first = "x = Gather<axis = 0>(steps, k) go = Identity(on)"
        body = f"(int64 k, bool on, {state} h, {state} c) => (bool go, {results}) {{ {first} {STEP} }}"
        loop = (
            f"count = Constant<value = int64 {{{STEPS}}}>() true = Constant<value = bool {{1}}>() "
            f"end, c_end, all = Loop(count, true, start, start)<body = step {body}>"
        )
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        lstm (float[{batch},{STEPS},{INPUTS}] X, float[{INPUTS},{4 * UNITS}] W, float[{UNITS},{4 * UNITS}] R,
              float[{4 * UNITS}] b) => (float[{STEPS},{batch},{UNITS}] all) {{
            steps = Transpose<perm = [1, 0, 2]>(X)
            sizes = Shape<start = 0, end = 1>(X)
            units = Constant<value = int64[1] {{{UNITS}}}>()
            shape = Concat<axis = 0>(sizes, units)
            start = ConstantOfShape(shape)
            {loop}
        }}"""
    )


def main() -> None:
    rows = []
    rng = np.random.default_rng(0)
    for operator in ("Loop", "Scan"):
        for size, batch in ((1, "1"), (1, "N"), (32, "32"), (32, "N")):
            forward = model(operator, batch)
            gradient = refgrad.gradient(forward, ["W", "R", "b"])
            shapes = {
                "X": (size, STEPS, INPUTS),
                "W": (INPUTS, 4 * UNITS),
                "R": (UNITS, 4 * UNITS),
                "b": (4 * UNITS,),
            }
            feeds = {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
            seeds = {"all_grad": rng.standard_normal((STEPS, size, UNITS)).astype(np.float32)}
            for backend in ("ort-cpu", "numpy"):
                plain, slope = (get_backend(backend).prepare(one) for one in (forward, gradient))
                ours, theirs, ratio = alternate(partial(slope.run, feeds | seeds), partial(plain.run, feeds), 15)
                rows.append(
                    {
                        "an LSTM as a": operator,
                        "batch": f"{size}, {'known' if batch.isdecimal() else 'not known'}",
                        "backend": backend,
                        "model ms": round(1e3 * theirs, 2),
                        "gradient ms": round(1e3 * ours, 2),
                        "ratio": round(ratio, 2),
                    }
                )
    save("loops", rows)


if __name__ == "__main__":
    main()

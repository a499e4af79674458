"""The operators that torch has, at sizes that models have: what benchmarks/operators.py measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Make = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Row:
    """A node: how its inputs are made (None: there is none), which are constants, and its attributes.

    `fused` names the function of torch in `fused_torch` where torch has one kernel for what the table of the oracle composes.
    """

    label: str
    op_type: str
    inputs: tuple[Make | None, ...]
    constant: tuple[str, ...]
    attributes: dict[str, Any]
    outputs: int | tuple[int, ...]
    wrt: tuple[str, ...] | None


ROWS: list[Row] = []
_NEW = {
    "Swish": 24,
    "Attention": 23,
    "RMSNormalization": 23,
}  # the others are measured in the opset that all runtimes have


def row(
    op_type: str,
    size: str,
    /,
    *inputs: Make | None,
    constant: Sequence[str] = (),
    outputs: int | tuple[int, ...] = 1,
    wrt: tuple[str, ...] | None = None,
    **attributes: Any,
) -> None:
    """Enter a row."""
    ROWS.append(Row(f"{op_type}, {size}", op_type, inputs, tuple(constant), attributes, outputs, wrt))


def f(*shape: int) -> Make:
    """Normal numbers."""
    return lambda rng: rng.standard_normal(shape, np.float32)


def u(low: float, high: float, *shape: int) -> Make:
    """Numbers between two others."""
    return lambda rng: rng.uniform(low, high, shape).astype(np.float32)


def i(high: int, *shape: int) -> Make:
    """Indices below `high`."""
    return lambda rng: rng.integers(0, high, shape)


def different(high: int, *shape: int) -> Make:
    """Indices below `high`, all different along the last axis."""
    return lambda rng: np.argsort(rng.random((*shape[:-1], high)), -1)[..., : shape[-1]]


def b(*shape: int) -> Make:
    """Booleans."""
    return lambda rng: rng.random(shape) < 0.5


def value(of: Any, dtype: str = "int64") -> Make:
    """An array that is given."""
    return lambda rng: np.array(of, dtype)


TOKENS, LARGE = (8, 128, 768), (8, 512, 768)

# Element by element

for _name in (
    "Abs",
    "Cos",
    "Erf",
    "Exp",
    "Neg",
    "Sigmoid",
    "Sin",
    "Softplus",
    "Softsign",
    "Tanh",
    "Relu",
    "Atan",
    "Sinh",
):
    row(_name, "8×128×768", f(*TOKENS))
for _name in ("Sigmoid", "Tanh", "Relu"):
    row(_name, "8×512×768", f(*LARGE))
for _name in (
    "Elu",
    "Selu",
    "Celu",
    "LeakyRelu",
    "ThresholdedRelu",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Shrink",
    "Cosh",
):
    row(_name, "8×128×768", f(*TOKENS))
row("Gelu", "8×128×3072", f(8, 128, 3072))
row("Gelu", "8×128×3072, tanh", f(8, 128, 3072), approximate="tanh")
row("Swish", "8×128×3072", f(8, 128, 3072))
for _name in ("Log", "Sqrt", "Reciprocal"):
    row(_name, "8×128×768", u(0.5, 2, *TOKENS))
for _name in ("Acos", "Asin", "Atanh", "Tan"):
    row(_name, "8×128×768", u(-0.9, 0.9, *TOKENS))
row("Acosh", "8×128×768", u(1.1, 3, *TOKENS))
row("Asinh", "8×128×768", f(*TOKENS))
row("Clip", "8×128×768", f(*TOKENS), value(-1, "f4"), value(1, "f4"), constant=("min", "max"))
row("PRelu", "8×64×56×56, a channel each", f(8, 64, 56, 56), f(64, 1, 1))
row("Dropout", "8×128×768, not in training", f(*TOKENS))
row("Identity", "8×128×768", f(*TOKENS))
row("Cast", "8×128×768, to float64", f(*TOKENS), to=11)

for _name in ("Add", "Sub", "Mul"):
    row(_name, "8×128×768, same shapes", f(*TOKENS), f(*TOKENS))
row("Add", "8×512×768, bias 768", f(*LARGE), f(768))
row("Mul", "8×512×768, scale 768", f(*LARGE), f(768))
row("Add", "8×64×56×56, a channel each", f(8, 64, 56, 56), f(64, 1, 1))
row("Add", "8×128×768, rows 8×128×1", f(*TOKENS), f(8, 128, 1))
row("Div", "8×128×768, same shapes", f(*TOKENS), u(0.5, 2, *TOKENS))
row("Div", "8×128×768, rows 8×128×1", f(*TOKENS), u(0.5, 2, 8, 128, 1))
row("Pow", "8×128×768, squares", f(*TOKENS), value(2, "f4"), constant=("Y",))
row("Pow", "8×128×768, exponents", u(0.5, 2, *TOKENS), f(*TOKENS))
row("Mod", "8×128×768", u(-3, 3, *TOKENS), u(0.5, 2, *TOKENS), fmod=1)
row("Max", "8×128×768", f(*TOKENS), f(*TOKENS))
row("Min", "8×128×768", f(*TOKENS), f(*TOKENS))
row("Sum", "8×128×768, three", f(*TOKENS), f(*TOKENS), f(*TOKENS))
row("Mean", "8×128×768, three", f(*TOKENS), f(*TOKENS), f(*TOKENS))
row("Where", "8×128×768", b(*TOKENS), f(*TOKENS), f(*TOKENS))

# Products

row("MatMul", "8×128×768 by 768×768", f(*TOKENS), f(768, 768))
row("MatMul", "512×512 by 512×512", f(512, 512), f(512, 512))
row("MatMul", "96×128×64 by 96×64×128", f(96, 128, 64), f(96, 64, 128))
row("Gemm", "256×784 by 512×784, bias", f(256, 784), f(512, 784), f(512), transB=1)
row("Gemm", "1024×768 by 768×3072", f(1024, 768), f(768, 3072))
row("Einsum", "bhqd,bhkd->bhqk, 8×12×128×64", f(8, 12, 128, 64), f(8, 12, 128, 64), equation="bhqd,bhkd->bhqk")
row("Einsum", "bij,jk->bik, 16×128×256", f(16, 128, 256), f(256, 256), equation="bij,jk->bik")
row("Det", "64×8×8", f(64, 8, 8))
for _tokens, _heads in ((128, 12), (512, 12), (2048, 4)):
    _qkv = [f(1 if _tokens > 512 else 4, _heads, _tokens, 64)] * 3
    row("Attention", f"{_tokens} tokens, {_heads} heads of 64", *_qkv)
row("Attention", "512 tokens, causal", *[f(4, 12, 512, 64)] * 3, is_causal=1)

# Convolutions

row("Conv", "3×3, 8×64×56×56", f(8, 64, 56, 56), f(64, 64, 3, 3), pads=[1, 1, 1, 1])
row("Conv", "3×3, 8×256×14×14", f(8, 256, 14, 14), f(256, 256, 3, 3), f(256), pads=[1, 1, 1, 1])
row("Conv", "1×1, 8×64×56×56 to 256", f(8, 64, 56, 56), f(256, 64, 1, 1))
row("Conv", "1×1, 8×512×14×14 to 128", f(8, 512, 14, 14), f(128, 512, 1, 1))
row("Conv", "3×3 by 2, 8×64×56×56 to 128", f(8, 64, 56, 56), f(128, 64, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2])
row("Conv", "1×1 by 2, 8×64×56×56 to 128", f(8, 64, 56, 56), f(128, 64, 1, 1), strides=[2, 2])
row("Conv", "7×7 by 2, 8×3×224×224", f(8, 3, 224, 224), f(64, 3, 7, 7), pads=[3, 3, 3, 3], strides=[2, 2])
row("Conv", "16×16 by 16, 8×3×224×224", f(8, 3, 224, 224), f(192, 3, 16, 16), f(192), strides=[16, 16])
row("Conv", "3×3 dilated by 2, 8×64×28×28", f(8, 64, 28, 28), f(64, 64, 3, 3), pads=[2, 2, 2, 2], dilations=[2, 2])
row("Conv", "3×3 in 4 groups, 8×64×56×56", f(8, 64, 56, 56), f(64, 16, 3, 3), pads=[1, 1, 1, 1], group=4)
row("Conv", "3×3 depthwise, 8×96×56×56", f(8, 96, 56, 56), f(96, 1, 3, 3), pads=[1, 1, 1, 1], group=96)
row("Conv", "3×3 depthwise by 2, 8×96×56×56", f(8, 96, 56, 56), f(96, 1, 3, 3), pads=[1] * 4, strides=[2, 2], group=96)
row("Conv", "7×7 depthwise, 8×96×28×28", f(8, 96, 28, 28), f(96, 1, 7, 7), f(96), pads=[3, 3, 3, 3], group=96)
row("Conv", "1-D of 9, 8×64×512", f(8, 64, 512), f(64, 64, 9), pads=[4, 4])
row("Conv", "1-D depthwise of 4, 8×256×512", f(8, 256, 512), f(256, 1, 4), pads=[3, 0], group=256)
row("Conv", "3-D, 2×16×16×28×28", f(2, 16, 16, 28, 28), f(32, 16, 3, 3, 3), pads=[1] * 6)
row("ConvTranspose", "4×4 by 2, 4×64×28×28 to 32", f(4, 64, 28, 28), f(64, 32, 4, 4), strides=[2, 2], pads=[1] * 4)
row("ConvTranspose", "2×2 by 2, 4×128×28×28 to 64", f(4, 128, 28, 28), f(128, 64, 2, 2), f(64), strides=[2, 2])

# Pooling and images

row("MaxPool", "3×3 by 2, 8×64×112×112", f(8, 64, 112, 112), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
row("MaxPool", "2×2 by 2, 8×64×56×56", f(8, 64, 56, 56), kernel_shape=[2, 2], strides=[2, 2])
row("AveragePool", "2×2 by 2, 8×64×56×56", f(8, 64, 56, 56), kernel_shape=[2, 2], strides=[2, 2])
row("AveragePool", "3×3, 8×64×28×28", f(8, 64, 28, 28), kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])
row("GlobalAveragePool", "8×512×7×7", f(8, 512, 7, 7))
row("GlobalAveragePool", "8×64×56×56", f(8, 64, 56, 56))
row("GlobalMaxPool", "8×64×56×56", f(8, 64, 56, 56))
row(
    "Resize",
    "nearest ×2, 4×64×28×28",
    f(4, 64, 28, 28),
    None,
    value([1, 1, 2, 2], "f4"),
    constant=("scales",),
    mode="nearest",
    coordinate_transformation_mode="asymmetric",
    nearest_mode="floor",
)
row(
    "Resize",
    "linear ×2, 4×64×28×28",
    f(4, 64, 28, 28),
    None,
    value([1, 1, 2, 2], "f4"),
    constant=("scales",),
    mode="linear",
)
row("GridSample", "4×32×32×32", f(4, 32, 32, 32), u(-0.9, 0.9, 4, 32, 32, 2))
row("AffineGrid", "8×64×64", f(8, 2, 3), value([8, 3, 64, 64]), constant=("size",))
row(
    "Col2Im",
    "3×3, 4×32×28×28",
    f(4, 288, 784),
    value([28, 28]),
    value([3, 3]),
    constant=("image_shape", "block_shape"),
    pads=[1, 1, 1, 1],
)
row("DepthToSpace", "2, 4×64×28×28", f(4, 64, 28, 28), blocksize=2, mode="CRD")
row("SpaceToDepth", "2, 4×16×56×56", f(4, 16, 56, 56), blocksize=2)

# Normalizations

row("LayerNormalization", "8×512×768", f(*LARGE), f(768), f(768))
row("LayerNormalization", "8×128×768", f(*TOKENS), f(768), f(768))
row("RMSNormalization", "8×512×768", f(*LARGE), f(768))
row("GroupNormalization", "8 groups, 8×64×56×56", f(8, 64, 56, 56), f(64), f(64), num_groups=8)
row("InstanceNormalization", "8×64×56×56", f(8, 64, 56, 56), f(64), f(64))
row("BatchNormalization", "8×64×56×56", f(8, 64, 56, 56), f(64), f(64), f(64), u(0.5, 2, 64), wrt=("X", "scale", "B"))
row(
    "BatchNormalization",
    "8×64×56×56, training",
    f(8, 64, 56, 56),
    f(64),
    f(64),
    f(64),
    u(0.5, 2, 64),
    outputs=3,
    wrt=("X", "scale", "B"),
    training_mode=1,
)
row("LpNormalization", "8×128×768", f(*TOKENS))
row("LRN", "8×96×28×28", f(8, 96, 28, 28), size=5)

# Losses and softmax

row("Softmax", "8×12×128×128", f(8, 12, 128, 128))
row("Softmax", "64×32000", f(64, 32000))
row("LogSoftmax", "64×32000", f(64, 32000))
row("Softmax", "8×21×64×64, axis 1", f(8, 21, 64, 64), axis=1)
row("SoftmaxCrossEntropyLoss", "256×10000", f(256, 10000), i(10000, 256))
row("SoftmaxCrossEntropyLoss", "8×21×64×64", f(8, 21, 64, 64), i(21, 8, 64, 64))
row("NegativeLogLikelihoodLoss", "256×10000", f(256, 10000), i(10000, 256))

# Reductions

for _name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"):
    row(_name, "8×512×768, last axis", f(*LARGE), value([-1]), constant=("axes",), keepdims=0)
for _name in ("ReduceSum", "ReduceMean"):
    row(_name, "8×512×768, middle axis", f(*LARGE), value([1]), constant=("axes",), keepdims=0)
    row(_name, "8×512×768, first axes", f(*LARGE), value([0, 1]), constant=("axes",), keepdims=0)
for _name in ("ReduceMin", "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp"):
    row(_name, "8×128×768, last axis", f(*TOKENS), value([-1]), constant=("axes",), keepdims=0)
row("ReduceProd", "8×128×768, last axis", u(0.99, 1.01, *TOKENS), value([-1]), constant=("axes",), keepdims=0)
row("ReduceLogSum", "8×128×768, last axis", u(0.5, 2, *TOKENS), value([-1]), constant=("axes",), keepdims=0)
row("CumSum", "8×512×256, axis 1", f(8, 512, 256), value(1), constant=("axis",))

# Shapes

row("Transpose", "8×128×12×64, heads first", f(8, 128, 12, 64), perm=[0, 2, 1, 3])
row("Transpose", "1024×768", f(1024, 768))
row("Reshape", "8×128×768 to heads", f(*TOKENS), value([8, 128, 12, 64]), constant=("shape",))
row("Flatten", "8×64×56×56", f(8, 64, 56, 56))
row("Squeeze", "8×1×128×768", f(8, 1, 128, 768), value([1]), constant=("axes",))
row("Unsqueeze", "8×128×768", f(*TOKENS), value([1]), constant=("axes",))
row("Concat", "two of 8×128×768, last axis", f(*TOKENS), f(*TOKENS), axis=-1)
row("Concat", "two of 8×64×28×28, channels", f(8, 64, 28, 28), f(8, 64, 28, 28), axis=1)
row("Split", "8×128×2304 in three", f(8, 128, 2304), None, outputs=3, axis=-1, num_outputs=3)
row(
    "Slice",
    "8×512×768, half of the rows",
    f(*LARGE),
    value([0]),
    value([256]),
    value([1]),
    constant=("starts", "ends", "axes"),
)
row(
    "Slice",
    "8×512×768, every second row",
    f(*LARGE),
    value([0]),
    value([512]),
    value([1]),
    value([2]),
    constant=("starts", "ends", "axes", "steps"),
)
row("Pad", "8×64×56×56 by 1", f(8, 64, 56, 56), value([0, 0, 1, 1, 0, 0, 1, 1]), constant=("pads",))
row(
    "Pad",
    "8×64×56×56 by 1, reflect",
    f(8, 64, 56, 56),
    value([0, 0, 1, 1, 0, 0, 1, 1]),
    constant=("pads",),
    mode="reflect",
)
row("Expand", "8×1×768 to 8×128×768", f(8, 1, 768), value([8, 128, 768]), constant=("shape",))
row("Tile", "8×16×768 eight times", f(8, 16, 768), value([1, 8, 1]), constant=("repeats",))
row("Trilu", "32×256×256", f(32, 256, 256), upper=0)

# Indices

row("Gather", "1024 rows of 10000×768", f(10000, 768), i(10000, 8, 128))
row("Gather", "1024 rows of 1000×256", f(1000, 256), i(1000, 1024))
row("Gather", "16 columns of 8×128×768", f(*TOKENS), i(768, 16), axis=2)
row("Gather", "half of the rows of 64×196×192", f(64, 196, 192), i(196, 98), axis=1)
row("GatherElements", "64×1000, a column", f(64, 1000), i(1000, 64, 1), axis=1)
row("GatherElements", "256×512×64, axis 1", f(256, 512, 64), i(512, 256, 128, 64), axis=1)
row("GatherND", "1024 rows of 100×100×64", f(100, 100, 64), i(100, 1024, 2))
row("ScatterElements", "1000×256, axis 0, add", f(1000, 256), i(1000, 512, 256), f(512, 256), reduction="add")
row(
    "ScatterElements",
    "1000×256, axis 0",
    f(1000, 256),
    lambda rng: np.argsort(rng.random((1000, 256)), 0)[:512],
    f(512, 256),
)
row("ScatterND", "512 rows of 1000×256", f(1000, 256), lambda rng: rng.permutation(1000)[:512, None], f(512, 256))
row("ScatterND", "512 rows of 1000×256, add", f(1000, 256), i(1000, 512, 1), f(512, 256), reduction="add")
row("Compress", "half of the rows of 512×768", f(512, 768), b(512), axis=0)
row("TopK", "8 of 64 columns, 1024 rows", f(1024, 64), value([8]), constant=("K",), outputs=2)
row("TopK", "50 of 32000 columns, 16 rows", f(16, 32000), value([50]), constant=("K",), outputs=2)
row("OneHot", "1024 of 64", i(64, 1024), value([64]), value([0.0, 1.0], "f4"), constant=("depth",))
row("ReverseSequence", "64×16×256", f(64, 16, 256), value([64] * 16), constant=("sequence_lens",))

# Recurrences and signals


def recurrent(op_type: str, gates: int, size: int, **attributes: Any) -> None:
    """Enter a row of 100 steps, with weights so small that the gradient of the first step neither vanishes nor explodes."""

    def weights(*shape: int) -> Make:
        return lambda rng: rng.standard_normal(shape, np.float32) / np.float32(size**0.5)

    shapes = (1, gates * size, size), (1, gates * size, size), (1, gates * 2 * size)
    size_text = f"100 steps, batch 16, {size} to {size}"
    row(op_type, size_text, f(100, 16, size), *(weights(*s) for s in shapes), hidden_size=size, **attributes)


recurrent("RNN", 1, 64)
recurrent("GRU", 3, 64, linear_before_reset=1)
recurrent("LSTM", 4, 64)
recurrent("LSTM", 4, 256)
row("DFT", "32×512, real", f(32, 512, 1), None, value(1), constant=("axis",))
row("DFT", "32×256, complex", f(32, 256, 2), None, value(1), constant=("axis",))


def opset(op_type: str) -> int:
    """The opset of a row's model."""
    return _NEW.get(op_type, 21)


def fused_torch() -> dict[str, Callable[..., Any]]:
    """What torch has one kernel for; it takes attributes and inputs as the table of the oracle does, None where it has none."""
    import torch
    import torch.nn.functional as functional

    def pads(a: Any) -> tuple[int, ...] | None:
        half = len(a.pads or []) // 2
        given = a.pads or []
        return tuple(given[:half]) if list(given[:half]) == list(given[half:]) else None

    def conv(a: Any, x: Any, w: Any, bias: Any = None) -> Any:
        n = x.ndim - 2
        around = pads(a) if a.pads else (0,) * n
        if around is None:
            return None
        function = (functional.conv1d, functional.conv2d, functional.conv3d)[n - 1]
        return function(x, w, bias, tuple(a.strides or [1] * n), around, tuple(a.dilations or [1] * n), a.group)

    def conv_transpose(a: Any, x: Any, w: Any, bias: Any = None) -> Any:
        around = pads(a) if a.pads else 0
        return functional.conv_transpose2d(x, w, bias, tuple(a.strides), around, 0, a.group)

    def pool(function: Any) -> Any:
        return lambda a, x: function(x, tuple(a.kernel_shape), tuple(a.strides), pads(a) if a.pads else 0)

    def batch_norm(a: Any, x: Any, scale: Any, bias: Any, mean: Any, var: Any) -> Any:
        if a.training_mode:
            return functional.batch_norm(x, None, None, scale, bias, True, 0.0, a.epsilon)
        return functional.batch_norm(x, mean, var, scale, bias, False, 0.0, a.epsilon)

    def average_pool(a: Any, x: Any) -> Any:
        return functional.avg_pool2d(
            x, tuple(a.kernel_shape), tuple(a.strides), pads(a) if a.pads else 0, count_include_pad=False
        )

    def resize(a: Any, x: Any, roi: Any, scales: Any) -> Any:
        how = {"scale_factor": tuple(scales.tolist()[2:])}
        if a.mode == "nearest":
            return functional.interpolate(x, mode="nearest", **how)
        return functional.interpolate(x, mode="bilinear", align_corners=False, **how)

    def pad(a: Any, x: Any, widths: Any) -> Any:
        given = widths.tolist()
        half = len(given) // 2
        around = [n for k in reversed(range(half)) if given[k] or given[k + half] for n in (given[k], given[k + half])]
        return functional.pad(x, around, "constant" if a.mode == "constant" else a.mode)

    def gather(a: Any, x: Any, indices: Any) -> Any:
        if a.axis == 0 and x.ndim == 2:
            return functional.embedding(indices, x)
        return x.index_select(a.axis, indices)

    def slices(a: Any, x: Any, starts: Any, ends: Any, axes: Any, steps: Any = None) -> Any:
        where = [slice(None)] * x.ndim
        where[int(axes[0])] = slice(int(starts[0]), int(ends[0]), 1 if steps is None else int(steps[0]))
        return x[tuple(where)]

    def lrn(a: Any, x: Any) -> Any:
        return functional.local_response_norm(x, a.size, a.alpha, a.beta, a.bias)

    return {
        "Conv": conv,
        "ConvTranspose": conv_transpose,
        "MaxPool": pool(functional.max_pool2d),
        "AveragePool": average_pool,
        "BatchNormalization": batch_norm,
        "Resize": resize,
        "Pad": pad,
        "Gather": gather,
        "Slice": slices,
        "LRN": lrn,
        "Swish": lambda a, x: functional.silu(x),
        "PRelu": lambda a, x, slope: functional.prelu(x, slope.reshape(-1)),
        "Selu": lambda a, x: functional.selu(x),
        "HardSigmoid": lambda a, x: (x * a.alpha + a.beta).clamp(0, 1),
        "Cast": lambda a, x: x.double(),
        "LayerNormalization": lambda a, x, scale, bias: functional.layer_norm(x, x.shape[-1:], scale, bias, a.epsilon),
        "RMSNormalization": lambda a, x, scale: functional.rms_norm(x, x.shape[-1:], scale, a.epsilon),
        "SoftmaxCrossEntropyLoss": lambda a, x, target: functional.cross_entropy(x, target),
        "NegativeLogLikelihoodLoss": lambda a, x, target: functional.nll_loss(x, target),
        "GroupNormalization": lambda a, x, s, bias: functional.group_norm(x, a.num_groups, s, bias, a.epsilon),
        "LpNormalization": lambda a, x: functional.normalize(x, float(a.p), a.axis),
        "OneHot": lambda a, indices, depth, values: torch.where(
            functional.one_hot(indices, int(depth)) > 0, values[1], values[0]
        ),
        "ReverseSequence": lambda a, x, lengths: x.flip(0),
        "Det": lambda a, x: torch.linalg.det(x),
        "Unsqueeze": lambda a, x, axes: x.unsqueeze(int(axes)),
        "Reshape": lambda a, x, shape: x.reshape(shape.tolist()),
        "Flatten": lambda a, x: x.flatten(1),
    }

"""ONNX Runtime's convolutions, and their gradients."""

from __future__ import annotations

from typing import Any

from refgrad.builder.function import FunctionEmitter
from refgrad.extend import Arguments, Emitter, UnsupportedFormError, body, form
from refgrad.formulas.convolution import conv_transpose_adjoints
from refgrad.microsoft.bodies.activation import activated, plus
from refgrad.protos.domains import MICROSOFT
from refgrad.rewrites.results import like, typed
from refgrad.tables.definitions import Floats, Ints, Shapes


def _check_window(shapes: Shapes, args: Arguments) -> None:
    """Refuse an attribute that does not have a number for each axis of the images, or two in `pads`."""
    rank = shapes.rank(args.X) or shapes.rank(args.W)
    for name in ("kernel_shape", "strides", "dilations", "pads"):
        given, due = getattr(args, name, None), None if rank is None else (rank - 2) * (2 if name == "pads" else 1)
        if given and due is not None and len(given) != due:
            raise UnsupportedFormError(f"{name} is {list(given)}; for images of rank {rank} it has {due} numbers")


@body("FusedConv", "Y", check=_check_window, domain=MICROSOFT)
def fused_conv(
    op: FunctionEmitter,
    X: str,
    W: str,
    B: str | None = None,
    Z: str | None = None,
    *,
    activation: str | None = None,
    activation_params: Floats | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """activation(conv(X, W, B) + Z)"""
    y = _conv(op, Arguments(**locals()), X, W)
    return activated(op, plus(op, y, Z), activation, activation_params or ())


@body("NhwcConv", "Y", check=_check_window, domain=MICROSOFT)
def nhwc_conv(
    op: FunctionEmitter,
    X: str,
    W: str,
    B: str | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """conv(X, W, B) with the channels of X, W and Y on the last axis

    The schema has W as in Conv. ONNX Runtime's transformer optimizer, which writes the operator, puts its channels last, as
    the CUDA kernel reads them.
    """
    args, rank = Arguments(**locals()), _rank(op, X, W, kernel_shape)
    y = _conv(op, args, channels_first(op, X, rank), channels_first(op, W, rank))
    return channels_last(op, y, rank)


@body("NhwcFusedConv", "Y", check=_check_window, domain=MICROSOFT)
def nhwc_fused_conv(
    op: FunctionEmitter,
    X: str,
    W: str,
    B: str | None = None,
    Z: str | None = None,
    *,
    activation: str | None = None,
    activation_params: Floats | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """activation(conv(X, W, B) + Z) with the channels of X, Y and Z on the last axis, and W as in Conv"""
    args, rank = Arguments(**locals()), _rank(op, X, W, kernel_shape)
    y = channels_last(op, _conv(op, args, channels_first(op, X, rank), W), rank)
    return activated(op, plus(op, y, Z), activation, activation_params or ())


@body("ConvTransposeWithDynamicPads", "Y", types={"Pads": ["tensor(int64)"]}, check=_check_window, domain=MICROSOFT)
def conv_transpose_with_dynamic_pads(
    op: FunctionEmitter,
    X: str,
    W: str,
    Pads: str | None = None,
    B: str | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    strides: Ints | None = None,
) -> str:
    """conv_transpose(X, W, B), of which Pads are cut off; auto_pad="SAME_UPPER" and "SAME_LOWER" cut without asking Pads"""
    window: dict[str, Any] = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "strides": strides}
    y = op.ConvTranspose(X, W, B, kernel_shape=kernel_shape, output_padding=output_padding, **window)
    if Pads is None or auto_pad.startswith("SAME"):
        return y
    axes = list(range(2, _rank(op, X, W, kernel_shape)))
    begin, end = op.Split(op.Reshape(Pads, [2, -1]), op.const([1, 1]), axis=0, outputs=2)
    return op.Slice(y, op.Reshape(begin, [-1]), op.Sub(op.Shape(y, start=2), op.Reshape(end, [-1])), axes)


def _conv(op: FunctionEmitter, args: Arguments, X: str, W: str) -> str:
    """Conv of these images and filters with the bias and the attributes of the node."""
    return str(op.Conv(X, W, args.B, **{name: getattr(args, name) for name in _CONV}))


def _rank(op: FunctionEmitter, X: str, W: str, kernel_shape: Ints | None) -> int:
    """The rank of the images."""
    rank = len(kernel_shape) + 2 if kernel_shape else op.rank(X) or op.rank(W)
    if rank is None:
        raise UnsupportedFormError("its rank is not known: give it kernel_shape, or declare the shape of X")
    return rank


def channels_first(op: FunctionEmitter, x: str, rank: int) -> str:
    """The last axis behind the first."""
    return op.Transpose(x, perm=[0, rank - 1, *range(1, rank - 1)])


def channels_last(op: FunctionEmitter, x: str, rank: int) -> str:
    """The second axis behind all others."""
    return op.Transpose(x, perm=[0, *range(2, rank), 1])


_CONV: dict[str, Any] = {
    "auto_pad": "NOTSET",
    "dilations": None,
    "group": 1,
    "kernel_shape": None,
    "pads": None,
    "strides": None,
}


def _is_empty(op: Emitter, X: str) -> bool:
    """True if it is known that there are no images: ONNX Runtime's Conv refuses them"""
    return (op.shape(X) or (None,))[0] == 0


def _nothing(op: Emitter, dY: str, X: str, W: str) -> tuple[str, str, str]:
    return op.zeros_like(X), op.zeros_like(W), op.full(op.Shape(dY, start=1, end=2), 0.0, like=W)


def _of_images(op: Emitter, X: str, dW: str) -> str:
    """0 where the run tells that there are no images: ONNX Runtime's Conv then returns what was in the memory before"""
    batch = (op.shape(X) or (None,))[0]
    return dW if isinstance(batch, int) else op.Where(op.Equal(op.Shape(X, end=1), 0), 0.0, dW)


@form("ConvGrad", results=[like("X"), like("W"), typed("W")], attributes=_CONV)
def conv_grad(op: Emitter, dY: str, X: str, W: str, **attributes: Any) -> tuple[str, str, str]:
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    dX, dW, dB = op.grad.ConvGrad(dY, X, W, **attributes)
    return dX, _of_images(op, X, dW), dB


@form(
    "ConvTransposeGrad",
    results=[like("X"), like("W"), typed("W")],
    attributes=_CONV | {"output_padding": None, "output_shape": None},
)
def conv_transpose_grad(op: Emitter, dY: str, X: str, W: str, **attributes: Any) -> tuple[str, str, str]:
    if _is_empty(op, X):
        return _nothing(op, dY, X, W)
    dX, dW, dB = conv_transpose_adjoints(op, dY, X, W, **attributes)
    return dX, _of_images(op, X, dW), dB

"""ONNX Runtime's quantization in training."""

from __future__ import annotations

from refgrad.forward.function_emitter import FunctionEmitter
from refgrad.microsoft.forms import form
from refgrad.microsoft.results import like
from refgrad.protos.domains import MICROSOFT
from refgrad.reverse.emit import Emitter
from refgrad.tables.definitions import operator
from refgrad.tables.registry import rule


@operator("FakeQuant", "fake_quantized_tensor", optional=["mask"], others=("mask",))
def fake_quant_body(
    op: FunctionEmitter, input_tensor: str, scale: str, zero_point: str, *, quant_min: int = 0, quant_max: int = 255
) -> tuple[str, str]:
    """(clip(round(x/scale) + zero_point, quant_min, quant_max) − zero_point)·scale"""
    q = op.Add(op.Round(op.Div(input_tensor, scale)), zero_point)
    low, high = (op.const(bound, like=input_tensor) for bound in (quant_min, quant_max))
    inside = op.And(op.GreaterOrEqual(q, low), op.LessOrEqual(q, high))
    return op.Mul(op.Sub(op.Min(op.Max(q, low), high), zero_point), scale), inside


@rule("FakeQuant", domain=MICROSOFT)
def fake_quant(
    op: Emitter,
    d_fake_quantized_tensor: str,
    input_tensor: str,
    scale: str,
    zero_point: str,
    fake_quantized_tensor: str,
    mask: str,
) -> tuple[str, str, str]:
    """dx = 0, dscale = Σ dy·(q − zero_point), dzero_point = −Σ dy·scale where q was clipped

    With quantization="straight-through" dx = dy and dzero_point = 0, with "clipped" dx = dy where q was not clipped; in both
    dscale is less by dx·x/scale.
    """
    d_y = d_fake_quantized_tensor
    d_zero_point = op.Neg(op.Where(mask, 0.0, op.Mul(d_y, scale)))
    d_scale = op.Div(op.Mul(d_y, fake_quantized_tensor), scale)
    d_x = op.zeros_like(input_tensor)
    if op.quantization != "zero":
        d_x = d_y if op.quantization == "straight-through" else op.grad.FakeQuantGrad(d_y, mask)
        d_scale = op.Sub(d_scale, op.Div(op.Mul(d_x, input_tensor), scale))
    if op.quantization == "straight-through":
        d_zero_point = op.zeros_like(input_tensor)
    d_scale = op.grad.BroadcastGradient(d_scale, scale, (scale, input_tensor))
    return d_x, d_scale, op.grad.BroadcastGradient(d_zero_point, zero_point, (zero_point, input_tensor))


@form("FakeQuantGrad", results=[like("dY")])
def fake_quant_grad(op: Emitter, dY: str, mask: str) -> str:
    return op.grad.FakeQuantGrad(dY, mask)

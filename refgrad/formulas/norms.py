"""Quotients by a norm. A norm has no derivative at 0, but many functions of it have one."""

from __future__ import annotations

from refgrad.builder.op import Emitter
from refgrad.formulas.types import wide_type
from refgrad.model.factors import RESHAPES, Operation, cofactor, viewed, written


def quotient(op: Emitter, value: str, factor: str, power: int = 1) -> str | None:
    """`value`/`factor`^power in the shape of `factor`, where `value` is emitted as a product with that power; else None.

    Nothing is divided: the result is right where the factor is 0, and so is its derivative. A dialect that follows
    ONNX Runtime's builder writes the division.
    """
    if op.dialect.follows_onnxruntime:
        return None
    made, forward, rest = op.emission.made, op.graph.producer, value

    def producer(name: str) -> Operation | None:
        return made.get(name) or forward.get(name)

    origin = producer(factor)

    def is_factor(name: str) -> bool:
        """True for a view of the factor, which is aligned with it if it fits a cotangent, and for the same node again."""
        name = viewed(name, producer)
        other = producer(name)
        return name == factor or (
            origin is not None
            and other is not None
            and (other.op_type, other.inputs, other.attributes) == (origin.op_type, origin.inputs, origin.attributes)
        )

    for _ in range(power):
        found = cofactor(rest, is_factor, producer, op.constant, RESHAPES)
        if found is None:
            return None
        rest = written(found, lambda operator, *operands: str(op.emit(operator, "", operands, 1, {})))
    known, size = op.static(rest), op.static(factor)
    return rest if size == () or (size is not None and known == size) else op.Expand(rest, op.shape_of(factor))


def over_norm_power(op: Emitter, dY: str, Y: str, power: int) -> str:
    """dY/Y^power, and 0 where the norm Y is 0.

    If dY has the factor Y^power, the function of the norm is smooth at 0, and nothing is divided. Otherwise the derivative by
    Y is NaN where Y = 0, because the norm has no second derivative there.
    """
    rest = quotient(op, dY, Y, power)
    if rest is not None:
        return rest
    kind, wide = op.type(dY), wide_type(op, Y)  # 1/Y soon leaves the range of float16
    d_y, y = op.as_type(dY, wide), op.as_type(Y, wide)
    inverse = op.Reciprocal(y if power == 1 else op.Pow(y, float(power)))
    return op.as_type(op.Mul(d_y, op.Where(op.Equal(y, 0.0), 0.0, inverse)), kind)

"""Cotangents of slices: those that fill an axis are put side by side, without zeros between which they would be added."""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.builder.op import Emitter


def joined(op: Emitter, parts: Sequence[str], like: str) -> list[str]:
    """The cotangents `parts` of `like`, with one Concat for those whose ranges together are an axis.

    A dialect that follows ONNX Runtime's builder adds them all.
    """
    padded, shape = op.values.sparse.padded, op.shape(like)
    if op.dialect.follows_onnxruntime or shape is None:
        return list(parts)
    # By axis, and by where they begin: where the ranges end, and the parts that have them.
    ranges: dict[int, dict[int, tuple[int, list[int]]]] = {}
    for k, part in enumerate(parts):
        one = padded.get(part)
        size = None if one is None else shape[one.axis]
        if one is not None and isinstance(size, int):
            end, same = ranges.setdefault(one.axis, {}).setdefault(one.before, (size - one.behind, []))
            if end == size - one.behind:
                same.append(k)
    made, taken = list[str](), set[int]()
    for axis, by_begin in ranges.items():
        chain, reached = list[list[int]](), 0
        while reached in by_begin:
            reached, same = by_begin.pop(reached)
            chain.append(same)
        if reached == shape[axis] and len(chain) > 1:
            between = [[padded[parts[k]].value for k in same] for same in chain]
            made.append(op.Concat(*(v[0] if len(v) == 1 else op.sum(v, like) for v in between), axis=axis))
            taken.update(k for same in chain for k in same)
    return made + [part for k, part in enumerate(parts) if k not in taken]

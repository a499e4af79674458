"""Operators that move elements around without looking at them, and those that make tensors of a shape."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from onnx import helper

from refgrad.backends.numpy.kernels.operands import check_axes, check_axis
from refgrad.backends.numpy.registry import broadcasts, kernel
from refgrad.protos.domains import MICROSOFT

Ints = list[int] | None
_COPIED = 256  # elements: that many are copied sooner than viewed


@kernel("Shape", fresh=True)
def shape(data: np.ndarray, *, start: int = 0, end: int | None = None) -> np.ndarray:
    return np.array(data.shape[start:end], np.int64)


@kernel("Size", fresh=True)
def size(data: np.ndarray) -> np.ndarray:
    return np.array(data.size, np.int64)


@kernel("Reshape", view=True)
def reshape(
    data: np.ndarray, new_shape: np.ndarray | None = None, *, shape: Ints = None, allowzero: int = 0
) -> np.ndarray:
    """0 in the shape copies the input's dimension unless allowzero, -1 is inferred."""
    dims = shape if new_shape is None else new_shape.tolist()
    if not isinstance(dims, list):
        raise ValueError(f"the shape is {dims}; it must be a list of sizes")
    if 0 not in dims and min(dims, default=0) >= -1:  # the usual case, in which NumPy means the same
        try:
            return data.reshape(dims)
        except ValueError:
            pass  # what follows says why
    wanted = dims
    if not allowzero:
        if 0 in dims[data.ndim :]:
            raise ValueError(f"the shape {wanted} has a 0 where the data {list(data.shape)} have no size to copy")
        dims = [data.shape[i] if n == 0 else n for i, n in enumerate(dims)]
    if min(dims, default=0) < -1 or dims.count(-1) > 1 or (allowzero and -1 in dims and 0 in dims):
        raise ValueError(
            f"the shape {wanted} may have one -1, but not beside a 0 that allowzero allows, and no size below -1"
        )
    known = math.prod(n for n in dims if n != -1)
    if data.size % known if -1 in dims and known else data.size != (0 if -1 in dims else known):
        raise ValueError(f"the data {list(data.shape)} have {data.size} elements, which do not fit the shape {wanted}")
    if -1 in dims:
        dims = [(data.size // known if known else 0) if n == -1 else n for n in dims]
    return data.reshape(dims)


@kernel("Flatten", view=True)
def flatten(x: np.ndarray, *, axis: int) -> np.ndarray:
    split = axis if axis == x.ndim else check_axis(axis, x.ndim)
    return x.reshape(math.prod(x.shape[:split]), math.prod(x.shape[split:]))


@kernel("Transpose", view=True)
def transpose(data: np.ndarray, *, perm: Ints = None) -> np.ndarray:
    if perm is not None and sorted(perm) != list(range(data.ndim)):
        raise ValueError(f"perm={perm} is not a permutation of the {data.ndim} axes of {list(data.shape)}")
    return data.transpose(perm)


@kernel("Squeeze", view=True)
def squeeze(data: np.ndarray, axes_input: np.ndarray | None = None, *, axes: Ints = None) -> np.ndarray:
    over = axes if axes_input is None else axes_input.tolist()
    if over is None:
        return np.squeeze(data)
    for axis in check_axes(over, data.ndim):
        if data.shape[axis] != 1:
            raise ValueError(
                f"axis {axis} of {list(data.shape)} has {data.shape[axis]} elements; only an axis of 1 can be squeezed"
            )
    return np.squeeze(data, tuple(over))


_MOST_AXES = 64


@kernel("Unsqueeze", view=True)
def unsqueeze(data: np.ndarray, axes_input: np.ndarray | None = None, *, axes: Ints = None) -> np.ndarray:
    over = (axes or []) if axes_input is None else axes_input.reshape(-1).tolist()
    return data.reshape(_with_ones(data.shape, tuple(over)))


@lru_cache(maxsize=256)
def _with_ones(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with an axis of 1 at each of `axes`, which count in the result."""
    rank = len(shape) + len(axes)
    if rank > _MOST_AXES:  # NumPy would look for each axis among all others first
        raise ValueError(f"the result has {rank} axes, and NumPy has arrays of {_MOST_AXES} at most")
    at, sizes = check_axes(axes, rank), iter(shape)
    return tuple([1 if axis in at else next(sizes) for axis in range(rank)])


def _expanded_shape(data: np.ndarray, shape: np.ndarray) -> tuple[int, ...]:
    dims = shape.tolist()
    if shape.ndim != 1 or min(dims, default=0) < 0:
        raise ValueError(f"the shape is {dims}; it must be a list of sizes that are not negative")
    to = tuple(dims)
    return to if broadcasts(data.shape, to) else np.broadcast_shapes(data.shape, to)


def _expanded(data: np.ndarray, to: tuple[int, ...]) -> np.ndarray | None:
    """A view of that shape, None where a copy is there sooner."""
    if to == data.shape:
        return data
    return np.broadcast_to(data, to) if math.prod(to) > _COPIED else None


@kernel("Expand", abstract=lambda data, shape: _expanded(data, _expanded_shape(data, shape)))
def expand(data: np.ndarray, shape: np.ndarray) -> np.ndarray:
    to = _expanded_shape(data, shape)
    result = _expanded(data, to)
    if result is None:
        result = np.empty(to, data.dtype)
        result[...] = data
    return result


@kernel("Tile", since=6, fresh=True)
def tile(data: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    if repeats.shape != (data.ndim,) or (repeats < 0).any():
        raise ValueError(f"repeats is {repeats.tolist()}; it needs {data.ndim} numbers that are not negative")
    if not data.size:
        return np.empty([n * r for n, r in zip(data.shape, repeats.tolist(), strict=True)], data.dtype)
    return np.tile(data, tuple(repeats.tolist()))


@kernel("Tile", fresh=True)
def tile_1(data: np.ndarray, tiles: np.ndarray, axis: np.ndarray) -> np.ndarray:
    """`tiles` copies along one axis."""
    repeats = np.ones(data.ndim, np.int64)
    repeats[check_axis(int(axis.item()), data.ndim)] = int(tiles.item())
    return tile(data, repeats)


@kernel("Concat", fresh=True)
def concat(*inputs: np.ndarray, axis: int = 1) -> np.ndarray:
    along = check_axis(axis, inputs[0].ndim)
    try:
        return np.concatenate(inputs, along)
    except ValueError as error:
        shapes = ", ".join(str(list(x.shape)) for x in inputs)
        raise ValueError(f"the shapes {shapes} differ in another axis than {axis}") from error


@kernel("ConcatTraining", domain=MICROSOFT, fresh=True)
def concat_training(*inputs: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Concat, and the length of each input along the axis"""
    return concat(*inputs, axis=axis), np.array([x.shape[axis] for x in inputs], np.int64)


@kernel("Split", view=True)
def split(
    data: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    axis: int,
    split: Ints = None,
    num_outputs: int | None = None,
    _wanted: tuple[bool, ...],
) -> tuple[np.ndarray, ...]:
    """Pieces of the given lengths; without them equal ones, of which the last may be shorter"""
    if lengths is not None and lengths.ndim != 1:
        raise ValueError(f"the lengths have the shape {list(lengths.shape)}; they must be a list")
    parts = split if lengths is None else lengths.tolist()
    axis = check_axis(axis, data.ndim)
    if parts is None and num_outputs not in (None, len(_wanted)):
        raise ValueError(f"num_outputs={num_outputs}, and the node has {len(_wanted)} outputs")
    pieces = _pieces(data.shape[axis], axis, len(_wanted), None if parts is None else tuple(parts))
    return tuple([data[piece] for piece in pieces])


@lru_cache(maxsize=256)
def _pieces(size: int, axis: int, count: int, parts: tuple[int, ...] | None) -> tuple[tuple[slice, ...], ...]:
    """The slices of the `count` pieces of an axis."""
    if parts is None:
        length = -(-size // count)
        ends = [min(length * (i + 1), size) for i in range(count)]
    else:
        if len(parts) != count or min(parts, default=0) < 0:
            raise ValueError(f"the lengths are {list(parts)}; each of {count} outputs needs one that is not negative")
        if sum(parts) != size:
            raise ValueError(f"the lengths {list(parts)} add up to {sum(parts)}; axis {axis} has {size} elements")
        ends = list(accumulate(parts))
    before = (slice(None),) * axis
    return tuple([(*before, slice(start, end)) for start, end in pairwise((0, *ends))])


@kernel("SplitTraining", domain=MICROSOFT)
def split_training(
    data: np.ndarray, lengths: np.ndarray, *, axis: int = 0, _wanted: tuple[bool, ...]
) -> tuple[np.ndarray, ...]:
    """Pieces of the given lengths; without them equal ones, the first of which are longer by 1 where they do not fit"""
    if not lengths.size:
        return tuple(np.array_split(data, len(_wanted), axis))
    return split(data, lengths, axis=axis, _wanted=_wanted)


@kernel("Pad", since=11, fresh=True)
def pad(
    data: np.ndarray,
    pads: np.ndarray,
    constant_value: np.ndarray | None = None,
    axes: np.ndarray | None = None,
    *,
    mode: str,
) -> np.ndarray:
    """Pads of constant, edge, reflect or wrap; negative ones cut, before the others are added"""
    over = range(data.ndim) if axes is None else check_axes(axes.tolist(), data.ndim)
    if pads.shape != (2 * len(over),):
        raise ValueError(f"pads has the shape {list(pads.shape)}; {len(over)} axes need {2 * len(over)} numbers")
    width = [(0, 0)] * data.ndim
    for axis, begin, end in zip(over, pads[: len(pads) // 2].tolist(), pads[len(pads) // 2 :].tolist(), strict=True):
        width[axis] = (begin, end)
    cut = tuple(slice(max(-b, 0), n - max(-e, 0)) for n, (b, e) in zip(data.shape, width, strict=True))
    for n, (b, e) in zip(data.shape, width, strict=True):
        if n + b + e < 0 or n + min(b, 0) + min(e, 0) < 0:
            raise ValueError(f"pads {pads.tolist()} cut more of the data {list(data.shape)} than there is")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise ValueError(f"mode={mode!r} is not known; there are 'constant', 'edge', 'reflect' and 'wrap'")
    add = [(max(b, 0), max(e, 0)) for b, e in width]
    if mode != "constant" and data.ndim:  # NumPy wants an axis
        return np.pad(data[cut], add, mode=mode)  # type: ignore[call-overload, no-any-return]
    fill = data.dtype.type(0) if constant_value is None else constant_value.reshape(())
    if data.dtype == object and constant_value is None:
        fill = ""
    padded = np.full([n + b + e for n, (b, e) in zip(data[cut].shape, add, strict=True)], fill, data.dtype)
    padded[tuple(slice(b, n - e) for n, (b, e) in zip(padded.shape, add, strict=True))] = data[cut]
    return padded


@kernel("Pad", since=2, fresh=True)
def pad_2(data: np.ndarray, *, pads: list[int], mode: str, value: float) -> np.ndarray:
    return pad(data, np.array(pads, np.int64), np.array(value, data.dtype), mode=mode)


@kernel("Pad", fresh=True)
def pad_1(data: np.ndarray, *, paddings: list[int], mode: str, value: float) -> np.ndarray:
    return pad_2(data, pads=paddings, mode=mode, value=value)


@kernel("CenterCropPad", fresh=True)
def center_crop_pad(data: np.ndarray, shape: np.ndarray, *, axes: Ints = None) -> np.ndarray:
    """The middle of the data, zeros around it; of an odd number one more is cut, or added, behind."""
    over = range(data.ndim) if axes is None else check_axes(axes, data.ndim)
    dims, source, target = list(data.shape), [slice(None)] * data.ndim, [slice(None)] * data.ndim
    for axis, wanted in zip(over, shape.tolist(), strict=True):
        n = data.shape[axis]
        skipped, added = max(n - wanted, 0) // 2, max(wanted - n, 0) // 2
        dims[axis], length = wanted, min(n, wanted)
        source[axis], target[axis] = slice(skipped, skipped + length), slice(added, added + length)
    result = np.full(dims, "" if data.dtype == object else 0, data.dtype)
    result[tuple(target)] = data[tuple(source)]
    return result


@kernel("DepthToSpace", fresh=True)
def depth_to_space(x: np.ndarray, *, blocksize: int, mode: str = "DCR") -> np.ndarray:
    """(N, C·b², H, W) to (N, C, H·b, W·b); the channels are b, b, C ("DCR") or C, b, b ("CRD")"""
    b = blocksize
    n, channels, h, w = x.shape
    if channels % (b * b):
        raise ValueError(f"the input has {channels} channels, which blocks of {b}×{b} do not divide")
    c = channels // (b * b)
    if _block_mode(mode):
        parts = x.reshape(n, b, b, c, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c, b, b, h, w).transpose(0, 1, 4, 2, 5, 3)
    return parts.copy().reshape(n, c, h * b, w * b)


@kernel("SpaceToDepth", fresh=True)
def space_to_depth(x: np.ndarray, *, blocksize: int, mode: str = "DCR") -> np.ndarray:
    """(N, C, H·b, W·b) to (N, C·b², H, W); the channels are b, b, C ("DCR") or C, b, b ("CRD")"""
    b = blocksize
    n, c, height, width = x.shape
    if height % b or width % b:
        raise ValueError(f"the image is {height}×{width}, which blocks of {b}×{b} do not divide")
    parts = x.reshape(n, c, height // b, b, width // b, b)
    parts = parts.transpose(0, 3, 5, 1, 2, 4) if _block_mode(mode) else parts.transpose(0, 1, 3, 5, 2, 4)
    return parts.copy().reshape(n, c * b * b, height // b, width // b)


def _block_mode(mode: str) -> bool:
    """True if the blocks come before the depth."""
    if mode not in ("DCR", "CRD"):
        raise ValueError(f"mode={mode!r} is neither 'DCR' nor 'CRD'")
    return mode == "DCR"


@kernel("ReverseSequence", fresh=True)
def reverse_sequence(x: np.ndarray, sequence_lens: np.ndarray, *, batch_axis: int, time_axis: int) -> np.ndarray:
    """The first `sequence_lens[i]` steps of each sequence i turned round."""
    if {batch_axis, time_axis} != {0, 1}:
        raise ValueError(f"batch_axis={batch_axis} and time_axis={time_axis} must be 0 and 1, or 1 and 0")
    batch, steps = x.shape[batch_axis], np.arange(x.shape[time_axis])
    if sequence_lens.shape != (batch,) or not all(0 <= n <= steps.size for n in sequence_lens.tolist()):
        raise ValueError(f"sequence_lens is {sequence_lens.tolist()}; it needs {batch} lengths from 0 to {steps.size}")
    lengths = sequence_lens[:, np.newaxis]
    source = np.where(steps < lengths, lengths - 1 - steps, steps)
    which = np.arange(batch)[:, np.newaxis]
    return x[which, source] if batch_axis == 0 else x[source.T, which.T]


@kernel("ConstantOfShape", fresh=True)
def constant_of_shape(shape: np.ndarray, *, value: np.ndarray | None = None) -> np.ndarray:
    fill = np.float32(0) if value is None else value.reshape(())
    if shape.ndim != 1 or (shape < 0).any():
        raise ValueError(f"the shape is {shape.tolist()}; it must be a list of sizes that are not negative")
    if fill.dtype != object and not any(fill.tobytes()):  # new memory is zero; −0 has to be written
        return np.zeros(tuple(shape.tolist()), fill.dtype)
    return np.full(tuple(shape.tolist()), fill, fill.dtype)


@kernel("EyeLike", fresh=True)
def eye_like(x: np.ndarray, *, dtype: int | None = None, k: int) -> np.ndarray:
    if x.ndim != 2:
        raise ValueError(f"the input has rank {x.ndim}; a matrix has rank 2")
    rows, columns = x.shape
    return np.eye(rows, columns, k, x.dtype if dtype is None else helper.tensor_dtype_to_np_dtype(dtype))


@kernel("Range", fresh=True)
def range_(start: np.ndarray, limit: np.ndarray, delta: np.ndarray, *, stash_type: int = 1) -> np.ndarray:
    """The i-th number is start + i·delta, for i < ⌈(limit − start)/delta⌉; floats in double whatever `stash_type` is."""
    a, b, step = start.item(), limit.item(), delta.item()
    if not step or not math.isfinite((b - a) / step):
        raise ValueError(f"there is no range from {a} to {b} by {step}: the step must not be 0, and the range must end")
    whole = start.dtype.kind in "iu"  # counted in integers: a quotient of floats is off by one beyond 2⁵³
    count = max(-((a - b) // step) if whole else math.ceil((b - a) / step), 0)
    return np.asarray(a + np.arange(count) * step).astype(start.dtype)


@kernel("Trilu", fresh=True)
@kernel("Trilu", domain=MICROSOFT, fresh=True)
def trilu(x: np.ndarray, k: np.ndarray | None = None, *, upper: int) -> np.ndarray:
    if x.ndim < 2:
        raise ValueError(f"the input has rank {x.ndim}; matrices have rank 2 or more")
    diagonal = 0 if k is None else int(k.item())
    if x.dtype == object:
        kept = np.ones(x.shape, bool)
        return np.where(np.triu(kept, diagonal) if upper else np.tril(kept, diagonal), x, np.array("", object))
    return np.triu(x, diagonal) if upper else np.tril(x, diagonal)


@kernel("BroadcastGradientArgs", domain=MICROSOFT, fresh=True)
def broadcast_gradient_args(a_shape: np.ndarray, b_shape: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the axes that each of two operands was broadcast along, in the order that ONNX Runtime has: descending."""
    a, b = a_shape.tolist(), b_shape.tolist()
    rank = max(len(a), len(b))
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise ValueError(f"shapes {a_shape.tolist()} and {b_shape.tolist()} do not broadcast")
    return _broadcast_axes(a, b, rank - a_shape.size), _broadcast_axes(b, a, rank - b_shape.size)


def _broadcast_axes(own: list[int], other: list[int], added: int) -> np.ndarray:
    axes = [i for i, (m, n) in enumerate(zip(own, other, strict=True)) if i < added or (m == 1 and n != 1)]
    return np.array(axes[::-1], np.int64)

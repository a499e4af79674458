"""The operators of ONNX that torch has, in torch: an autodiff that knows nothing of refgrad.

Each function takes the attributes of a node (with the defaults of its opset; an older one has fewer), then its inputs as
tensors (None where absent), and returns its first output, or a tuple. It returns None for a form that torch does not have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from refgrad import traits

Attributes = SimpleNamespace
TABLE: dict[str, Callable[..., Any]] = {}


def operator(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the table."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return enter


def simple(name: str, function: Callable[..., Any]) -> None:
    """Enter a function that has no use for attributes."""
    TABLE[name] = lambda a, *inputs: function(*inputs)


for _name in sorted(
    traits.FUNCTIONS | {"Abs", "Add", "Det", "Div", "MatMul", "Mul", "Neg", "Relu", "Sigmoid", "Sub", "Tanh", "Where"}
):
    simple(_name, getattr(torch, _name.lower()))
simple("Identity", lambda x: x.clone())
simple("Sum", lambda *xs: sum(xs[1:], xs[0]))
simple("Mean", lambda *xs: sum(xs[1:], xs[0]) / len(xs))
simple("Max", lambda *xs: functools.reduce(torch.maximum, xs))
simple("Min", lambda *xs: functools.reduce(torch.minimum, xs))
simple("Softplus", functional.softplus)
simple("Softsign", functional.softsign)
simple("HardSwish", functional.hardswish)
simple("Mish", functional.mish)
simple("PRelu", lambda x, slope: torch.where(x > 0, x, slope * x))

TABLE["Mod"] = lambda a, x, y: torch.fmod(x, y) if a.fmod else torch.remainder(x, y)
TABLE["Celu"] = lambda a, x: functional.celu(x, a.alpha)
TABLE["Elu"] = lambda a, x: functional.elu(x, a.alpha)
TABLE["Selu"] = lambda a, x: a.gamma * torch.where(x > 0, x, a.alpha * torch.expm1(x))
TABLE["LeakyRelu"] = lambda a, x: functional.leaky_relu(x, a.alpha)
TABLE["ThresholdedRelu"] = lambda a, x: functional.threshold(x, a.alpha, 0.0)
TABLE["Shrink"] = lambda a, x: torch.where(x < -a.lambd, x + a.bias, torch.where(x > a.lambd, x - a.bias, 0 * x))
TABLE["HardSigmoid"] = lambda a, x: torch.clamp(a.alpha * x + a.beta, 0, 1)
TABLE["Gelu"] = lambda a, x: functional.gelu(x, approximate=a.approximate)
TABLE["Swish"] = lambda a, x: x * torch.sigmoid(a.alpha * x)
TABLE["Softmax"] = lambda a, x: torch.softmax(x, a.axis)
TABLE["LogSoftmax"] = lambda a, x: torch.log_softmax(x, a.axis)


@operator("Clip")
def clip(a: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x.clone() if low is None and high is None else torch.clamp(x, low, high)


@operator("Dropout")
def dropout(a: Attributes, x: Tensor, ratio: Any = None, training: Any = None) -> Tensor | None:
    return None if training is not None and bool(training) else x.clone()


# Reductions


def _dims(a: Attributes, x: Tensor, axes: Tensor | None) -> list[int]:
    given = a.axes if axes is None and hasattr(a, "axes") else axes
    if given is None or len(given) == 0:
        return [] if getattr(a, "noop_with_empty_axes", 0) else list(range(x.ndim))
    return [int(axis) for axis in given]


def _prod(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    for dim in dims:
        x = torch.prod(x, dim, keepdim=True)
    return x if keepdim else x.squeeze(tuple(dims))


for _name, _function in {
    "ReduceSum": torch.sum,
    "ReduceMean": torch.mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceProd": _prod,
    "ReduceL1": lambda x, dims, keepdim: torch.linalg.vector_norm(x, 1, dims, keepdim),
    "ReduceL2": lambda x, dims, keepdim: torch.linalg.vector_norm(x, 2, dims, keepdim),
    "ReduceSumSquare": lambda x, dims, keepdim: torch.sum(x * x, dims, keepdim),
    "ReduceLogSum": lambda x, dims, keepdim: torch.log(torch.sum(x, dims, keepdim)),
    "ReduceLogSumExp": torch.logsumexp,
}.items():

    def _reduce(a: Attributes, x: Tensor, axes: Tensor | None = None, function: Any = _function) -> Tensor | None:
        dims = _dims(a, x, axes)
        return function(x, dims, keepdim=bool(a.keepdims)) if dims else None

    TABLE[_name] = _reduce


@operator("CumSum", "CumProd")
def cumulate(a: Attributes, x: Tensor, axis: Tensor) -> Tensor:
    dim, product = int(axis), a.operator == "CumProd"
    x = x.flip(dim) if a.reverse else x
    total = torch.cumprod(x, dim) if product else torch.cumsum(x, dim)
    if a.exclusive:
        first = torch.full_like(total.narrow(dim, 0, 1), float(product))
        total = torch.cat([first, total.narrow(dim, 0, x.shape[dim] - 1)], dim)
    return total.flip(dim) if a.reverse else total


# Shapes

TABLE["Transpose"] = lambda a, x: x.permute(a.perm or list(range(x.ndim))[::-1])
TABLE["Concat"] = lambda a, *xs: torch.cat(xs, a.axis)
TABLE["Flatten"] = lambda a, x: x.reshape(math.prod(x.shape[: a.axis if a.axis >= 0 else a.axis + x.ndim]), -1)
TABLE["Expand"] = lambda a, x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(shape.tolist())))
TABLE["Tile"] = lambda a, x, repeats: x.repeat(repeats.tolist())
TABLE["Cast"] = lambda a, x: x.clone()
TABLE["CastLike"] = lambda a, x, like: x.clone()


@operator("Reshape")
def reshape(a: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    keep = not getattr(a, "allowzero", 0)
    return x.reshape([x.shape[k] if keep and n == 0 else n for k, n in enumerate(shape.tolist())])


@operator("Squeeze")
def squeeze(a: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


@operator("Unsqueeze")
def unsqueeze(a: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(n % rank for n in axes.tolist()):
        x = x.unsqueeze(axis)
    return x


@operator("Split")
def split(a: Attributes, x: Tensor, sizes: Tensor | None = None) -> Any:
    if sizes is not None:
        return torch.split(x, sizes.tolist(), a.axis)
    return torch.split(x, math.ceil(x.shape[a.axis] / a.outputs), a.axis)


@operator("Slice")
def slice_(a: Attributes, x: Tensor, starts: Tensor, ends: Tensor, axes: Any = None, steps: Any = None) -> Tensor:
    over = range(len(starts)) if axes is None else axes.tolist()
    by = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(over, starts.tolist(), ends.tolist(), by, strict=True):
        n = x.shape[axis]
        chosen = np.arange(n)[slice(max(start, -n), end, step)]
        x = x.index_select(axis, torch.tensor(chosen.copy(), device=x.device))
    return x


@operator("Pad")
def pad(a: Attributes, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
    over = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes.tolist()]
    for k, axis in enumerate(over):
        before, after = int(pads[k]), int(pads[k + len(over)])
        n = x.shape[axis]
        if a.mode == "constant":
            widths = [0, 0] * (x.ndim - 1 - axis) + [before, after]
            filled = 0.0 if value is None else value * (1 - functional.pad(torch.ones_like(x), widths))
            x = functional.pad(x, widths) + filled
        else:
            cut = np.arange(n)[max(-before, 0) : n - max(-after, 0)]
            x = x.index_select(
                axis, torch.tensor(np.pad(cut, (max(before, 0), max(after, 0)), mode=a.mode), device=x.device)
            )
    return x


@operator("DepthToSpace")
def depth_to_space(a: Attributes, x: Tensor) -> Tensor:
    if getattr(a, "mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, a.blocksize)
    n, c, h, w = x.shape
    b = a.blocksize
    return x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // b**2, h * b, w * b)


@operator("SpaceToDepth")
def space_to_depth(a: Attributes, x: Tensor) -> Tensor:
    if getattr(a, "mode", "DCR") == "CRD":
        return functional.pixel_unshuffle(x, a.blocksize)
    n, c, h, w = x.shape
    b = a.blocksize
    return x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


# Indices


def _positive(indices: Tensor, n: int) -> Tensor:
    return torch.where(indices < 0, indices + n, indices)


@operator("Gather")
def gather(a: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = a.axis % x.ndim
    flat = x.index_select(axis, _positive(indices.reshape(-1).long(), x.shape[axis]))
    return flat.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def gather_elements(a: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    return torch.gather(x, a.axis, _positive(indices.long(), x.shape[a.axis]))


@operator("GatherND")
def gather_nd(a: Attributes, x: Tensor, indices: Tensor) -> Tensor | None:
    return x[tuple(indices.long().movedim(-1, 0))] if not getattr(a, "batch_dims", 0) else None


@operator("ScatterElements")
def scatter_elements(a: Attributes, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    where, reduction = _positive(indices.long(), x.shape[a.axis]), getattr(a, "reduction", "none")
    if reduction == "none":
        return x.scatter(a.axis, where, updates)
    how = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[reduction]
    return x.scatter_reduce(a.axis, where, updates, how)


@operator("ScatterND")
def scatter_nd(a: Attributes, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor | None:
    reduction = getattr(a, "reduction", "none")
    if reduction not in ("none", "add"):
        return None
    return x.index_put(tuple(indices.long().movedim(-1, 0)), updates, accumulate=reduction == "add")


@operator("Compress")
def compress(a: Attributes, x: Tensor, condition: Tensor) -> Tensor:
    chosen = torch.nonzero(condition).reshape(-1)
    return x.reshape(-1)[chosen] if a.axis is None else x.index_select(a.axis, chosen)


@operator("TopK")
def top_k(a: Attributes, x: Tensor, k: Tensor) -> Tensor:
    return torch.topk(x, int(k), a.axis, bool(a.largest), bool(a.sorted)).values


@operator("OneHot")
def one_hot(a: Attributes, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count = int(depth.reshape(()))
    inside = (indices >= -count) & (indices < count)
    hot = functional.one_hot(torch.where(inside, indices, 0).long() % count, count) * inside.unsqueeze(-1)
    return torch.where(hot.movedim(-1, a.axis) > 0, values[1], values[0])


@operator("Trilu")
def trilu(a: Attributes, x: Tensor, k: Tensor | None = None) -> Tensor:
    return (torch.triu if a.upper else torch.tril)(x, 0 if k is None else int(k))


@operator("Unique")
def unique(a: Attributes, x: Tensor) -> Tensor | None:
    _, first = np.unique(x.detach().numpy(), return_index=True, axis=a.axis)  # torch.unique has no derivative
    if not a.sorted:
        return None
    return x.flatten()[torch.from_numpy(first)] if a.axis is None else x.index_select(a.axis, torch.from_numpy(first))


@operator("ReverseSequence")
def reverse_sequence(a: Attributes, x: Tensor, lengths: Tensor) -> Tensor:
    time = x.movedim((a.time_axis, a.batch_axis), (0, 1))
    columns = [torch.cat([time[:n, b].flip(0), time[n:, b]]) for b, n in enumerate(lengths.tolist())]
    return torch.stack(columns, 1).movedim((0, 1), (a.time_axis, a.batch_axis))


# Linear

TABLE["Einsum"] = lambda a, *xs: torch.einsum(a.equation, *xs)


@operator("Gemm")
def gemm(a: Attributes, x: Tensor, y: Tensor, c: Tensor | None = None) -> Tensor:
    product = a.alpha * (x.T if a.transA else x) @ (y.T if a.transB else y)
    return product if c is None else product + a.beta * c


# Windows


def _padded(a: Attributes, x: Tensor, kernel: Sequence[int], value: float = 0.0) -> Tensor:
    """`x` padded to exactly what the windows of the result read."""
    spatial = x.ndim - 2
    strides, dilations = a.strides or [1] * spatial, _dilations(a, spatial)
    given = a.pads or [0] * 2 * spatial
    widths = []
    for k in reversed(range(spatial)):
        need = (a.result.shape[k + 2] - 1) * strides[k] + (kernel[k] - 1) * dilations[k] + 1
        missing = need - x.shape[k + 2]
        before = given[k]
        if a.auto_pad.startswith("SAME"):
            missing = max(missing, 0)
            before = missing // 2 if a.auto_pad == "SAME_UPPER" else missing - missing // 2
            missing = max(need - x.shape[k + 2], -x.shape[k + 2])
            before = max(before, 0)
        widths += [before, missing - before]
    return functional.pad(x, widths, value=value)


def _dilations(a: Attributes, spatial: int) -> tuple[int, ...]:
    """The dilations of the node; before opset 19 AveragePool has none."""
    return tuple(getattr(a, "dilations", None) or [1] * spatial)


def _convolve(x: Tensor, w: Tensor, b: Tensor | None, a: Attributes, groups: int) -> Tensor:
    spatial = x.ndim - 2
    function = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    return function(x, w, b, tuple(a.strides or [1] * spatial), 0, _dilations(a, spatial), groups)


@operator("Conv")
def conv(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return _convolve(_padded(a, x, w.shape[2:]), w, b, a, a.group)


@operator("ConvTranspose")
def conv_transpose(a: Attributes, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor | None:
    spatial = x.ndim - 2
    pads = a.pads or [0] * 2 * spatial
    if a.auto_pad != "NOTSET" or a.output_shape:
        return None
    strides, dilations = a.strides or [1] * spatial, a.dilations or [1] * spatial
    more = a.output_padding or [0] * spatial
    function = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[spatial - 1]
    whole = function(x, w, b, tuple(strides), 0, 0, a.group, tuple(dilations))
    room = [n for k in reversed(range(spatial)) for n in (0, more[k])]
    beyond = (
        functional.pad(whole, room)
        if b is None
        else functional.pad(whole - _channels(b, whole), room) + _channels(b, whole)
    )
    for k in range(spatial):
        beyond = beyond.narrow(k + 2, pads[k], beyond.shape[k + 2] - pads[k] - pads[k + spatial])
    return beyond


def _channels(b: Tensor, x: Tensor) -> Tensor:
    return b.reshape(-1, *[1] * (x.ndim - 2))


def _window_sums(a: Attributes, x: Tensor) -> Tensor:
    """The sums over the windows of padded `x`, channel by channel."""
    ones = torch.ones((x.shape[1], 1, *a.kernel_shape), dtype=x.dtype, device=x.device)
    return _convolve(x, ones, None, a, x.shape[1])


@operator("AveragePool")
def average_pool(a: Attributes, x: Tensor) -> Tensor | None:
    counted = torch.ones_like(x)
    if a.count_include_pad and a.pads and a.auto_pad == "NOTSET":
        spatial = x.ndim - 2
        inner = SimpleNamespace(**{**vars(a), "pads": None})
        widths = [n for k in reversed(range(spatial)) for n in (a.pads[k], a.pads[k + spatial])]
        return _window_sums(a, _padded(inner, functional.pad(x, widths), a.kernel_shape)) / _window_sums(
            a, _padded(inner, functional.pad(counted, widths, value=1.0), a.kernel_shape)
        )
    if a.count_include_pad and a.auto_pad != "NOTSET":
        return None
    return _window_sums(a, _padded(a, x, a.kernel_shape)) / _window_sums(a, _padded(a, counted, a.kernel_shape))


@operator("LpPool")
def lp_pool(a: Attributes, x: Tensor) -> Tensor | None:
    return _window_sums(a, _padded(a, x.abs() ** a.p, a.kernel_shape)) ** (1 / a.p)


@operator("MaxPool")
def max_pool(a: Attributes, x: Tensor) -> Tensor | None:
    spatial = x.ndim - 2
    function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[spatial - 1]
    padded = _padded(a, x, a.kernel_shape, -math.inf)
    return function(padded, tuple(a.kernel_shape), tuple(a.strides or [1] * spatial), 0, _dilations(a, spatial))


simple("GlobalAveragePool", lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True))
simple("GlobalMaxPool", lambda x: x.amax(tuple(range(2, x.ndim)), keepdim=True))


@operator("GlobalLpPool")
def global_lp_pool(a: Attributes, x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, a.p, tuple(range(2, x.ndim)), keepdim=True)


@operator("Col2Im")
def col2im(a: Attributes, x: Tensor, image: Tensor, block: Tensor) -> Tensor | None:
    pads = a.pads or [0, 0, 0, 0]
    if len(image) != 2 or pads[:2] != pads[2:]:
        return None
    one = (1, 1)
    return functional.fold(
        x, image.tolist(), block.tolist(), tuple(a.dilations or one), pads[:2], tuple(a.strides or one)
    )


@operator("MaxUnpool")
def max_unpool(a: Attributes, x: Tensor, indices: Tensor, shape: Tensor | None = None) -> Tensor | None:
    if shape is not None or indices.unique().numel() < indices.numel():
        return None
    flat = torch.zeros(math.prod(a.result.shape), dtype=x.dtype, device=x.device)
    return flat.index_add(0, indices.reshape(-1), x.reshape(-1)).reshape(a.result.shape)


# Normalization


@operator("BatchNormalization")
def batch_norm(a: Attributes, x: Tensor, scale: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor | None:
    if getattr(a, "training_mode", 0):
        return functional.batch_norm(x, None, None, scale, b, True, 0.0, a.epsilon)
    mean, var, scale, b = (_channels(v, x) for v in (mean, var, scale, b))
    return (x - mean) / torch.sqrt(var + a.epsilon) * scale + b


@operator("InstanceNormalization")
def instance_norm(a: Attributes, x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    return functional.instance_norm(x, None, None, scale, b, True, 0.0, a.epsilon)


@operator("LayerNormalization")
def layer_norm(a: Attributes, x: Tensor, scale: Tensor, b: Tensor | None = None) -> tuple[Tensor, ...]:
    dims = tuple(range(a.axis % x.ndim, x.ndim))
    mean = x.mean(dims, keepdim=True)
    inverse = 1 / torch.sqrt(x.var(dims, correction=0, keepdim=True) + a.epsilon)
    y = (x - mean) * inverse * scale
    return (y if b is None else y + b), mean, inverse


@operator("RMSNormalization")
def rms_norm(a: Attributes, x: Tensor, scale: Tensor) -> Tensor:
    dims = tuple(range(a.axis % x.ndim, x.ndim))
    return x / torch.sqrt((x * x).mean(dims, keepdim=True) + a.epsilon) * scale


@operator("GroupNormalization")
def group_norm(a: Attributes, x: Tensor, scale: Tensor, b: Tensor) -> Tensor | None:
    return functional.group_norm(x, a.num_groups, scale, b, a.epsilon) if len(scale) == x.shape[1] else None


@operator("LpNormalization")
def lp_normalization(a: Attributes, x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, a.p, a.axis, keepdim=True)


@operator("LRN")
def lrn(a: Attributes, x: Tensor) -> Tensor:
    before, n = (a.size - 1) // 2, x.shape[1]
    square = functional.pad(x * x, [0, 0] * (x.ndim - 2) + [before, a.size - 1 - before])
    total = sum(square.narrow(1, k, n) for k in range(a.size))
    return x / (a.bias + a.alpha / a.size * total) ** a.beta


# Losses


@operator("NegativeLogLikelihoodLoss")
def nll(a: Attributes, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    counted = torch.ones_like(target, dtype=torch.bool) if a.ignore_index is None else target != a.ignore_index
    classes = torch.where(counted, target, 0).long()
    each = counted.to(x.dtype) * (1.0 if weight is None else weight[classes])
    loss = -each * x.gather(1, classes.unsqueeze(1)).squeeze(1)
    if a.reduction == "none":
        return loss
    return loss.sum() / each.sum() if a.reduction == "mean" else loss.sum()


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(a: Attributes, x: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    log_prob = torch.log_softmax(x, 1)
    return nll(a, log_prob, target, weight), log_prob


# Sampling and signals


@operator("GridSample")
def grid_sample(a: Attributes, x: Tensor, grid: Tensor) -> Tensor | None:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(a.mode, a.mode)
    if x.ndim not in (4, 5) or (x.ndim == 5 and mode == "bicubic"):
        return None
    return functional.grid_sample(x, grid, mode, a.padding_mode, bool(a.align_corners))


@operator("AffineGrid")
def affine_grid(a: Attributes, theta: Tensor, size: Tensor) -> Tensor | None:
    return functional.affine_grid(theta, size.tolist(), bool(a.align_corners))


@operator("Attention")
def attention(a: Attributes, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *more: Any) -> Tensor | None:
    odd = (a.softcap, getattr(a, "qk_matmul_output_mode", 0), a.outputs > 1, any(m is not None for m in more))
    if q.ndim != 4 or any(odd) or (a.is_causal and mask is not None):
        return None
    if getattr(a, "left_window_size", -1) not in (None, -1) or getattr(a, "right_window_size", -1) not in (None, -1):
        return None
    if mask is not None and (mask.ndim < 2 or mask.shape[-1] not in (1, k.shape[-2])):
        return None
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=bool(a.is_causal), scale=a.scale)


@operator("DFT")
def dft(a: Attributes, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor | None:
    dim = int(axis) if axis is not None else getattr(a, "axis", -2)
    dim = dim % x.ndim
    signal = torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]
    n = None if length is None else int(length)
    if a.inverse:
        return None if a.onesided else torch.view_as_real(torch.fft.ifft(signal, n, dim).resolve_conj())
    if a.onesided:
        return torch.view_as_real(torch.fft.rfft(signal, n, dim).resolve_conj()) if x.shape[-1] == 1 else None
    return torch.view_as_real(torch.fft.fft(signal, n, dim).resolve_conj())


# The order in which torch has the gates, by their places in ONNX; GRU's reset comes after the product in torch.
_GATES = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
_DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


@operator("RNN", "GRU", "LSTM")
def _recurrent(
    a: Attributes,
    X: Tensor,
    W: Tensor,
    R: Tensor,
    B: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    P: Tensor | None = None,
) -> Any:
    directions = len(W)
    names = a.activations or _DEFAULT[a.operator] * directions
    relu = a.operator == "RNN" and names[:directions] == ["Relu"] * directions
    plain = relu or names[: len(_DEFAULT[a.operator]) * directions] == _DEFAULT[a.operator] * directions
    if not plain or a.clip is not None or lengths is not None or P is not None:
        return None
    if (a.operator == "GRU" and not a.linear_before_reset) or (a.operator == "LSTM" and a.input_forget):
        return None
    parts, n = _GATES[a.operator], R.shape[2]

    def in_order(rows: Tensor) -> Tensor:
        return torch.cat([rows[k * n : (k + 1) * n] for k in parts])

    weights: list[Tensor] = []
    for k in range(directions):
        biases = () if B is None else B[k].chunk(2)
        weights += [in_order(rows) for rows in (W[k], R[k], *biases)]
    if a.layout:
        X, h, c = (None if x is None else x.transpose(0, 1) for x in (X, h, c))
    zeros = torch.zeros((directions, X.shape[1], n), dtype=X.dtype, device=X.device)
    starts = [zeros if state is None else state for state in (h, c)]
    backward = a.direction == "reverse"
    # In training, without dropout: cuDNN differentiates nothing else.
    shared = weights, B is not None, 1, 0.0, True, directions == 2, False
    X = X.flip(0) if backward else X
    if a.operator == "LSTM":
        Y, *states = torch.lstm(X, starts, *shared)
    else:
        function = {"RNN": torch.rnn_relu if relu else torch.rnn_tanh, "GRU": torch.gru}[a.operator]
        Y, *states = function(X, starts[0], *shared)
    Y = (Y.flip(0) if backward else Y).reshape(*X.shape[:2], directions, n)
    if a.layout:
        return Y.transpose(0, 1), *(state.transpose(0, 1) for state in states)
    return Y.transpose(1, 2), *states

"""ONNX Runtime's mixtures of experts, and what routes tokens to them.

A Scan goes from expert to expert: it gathers the tokens that choose the expert, and adds what it makes of them to their rows of
the result. So no token is given to an expert that it does not choose, and the gradient of an expert's weights is a slice of one
tensor. Which experts a token chooses is piecewise constant; the derivative passes through the weights of those chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from onnx import TensorProto

from refgrad.builder.function import FunctionEmitter
from refgrad.errors import choices
from refgrad.extend import Arguments, UnsupportedFormError, body
from refgrad.formulas.indexing import END
from refgrad.formulas.quantized_weights import BLOCKS, is_block_size
from refgrad.microsoft.bodies.activation import gelu_formula, halves
from refgrad.microsoft.declared import Size, check_shape, first, product, sizes
from refgrad.protos.domains import MICROSOFT
from refgrad.protos.types import SIXTEEN_BIT
from refgrad.tables.definitions import FLOATS, Shapes

# Of the sparse mixer: a logit further than twice that below the largest, relative to its size, is left out.
JITTER = 0.01
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity", "relu2", "geglu")


@dataclass(frozen=True)
class Activation:
    """The activation of an expert between its products, by the attributes of the operators that have experts."""

    activation_type: str
    swiglu_fusion: int
    activation_alpha: float
    activation_beta: float
    swiglu_limit: float | None
    swiglu_limit_after_activation: int

    @classmethod
    def of_node(cls, args: Arguments) -> Activation:
        """The activation that the attributes of a node ask for."""
        return cls(*(getattr(args, field.name) for field in fields(cls)))

    def check(self, separate: bool) -> None:
        """Refuse an activation or a fusion that is not known; `separate`: FC3 is given."""
        kind, fusion = self.activation_type, self.swiglu_fusion
        if kind not in ACTIVATIONS:
            raise UnsupportedFormError(f"its activation_type {kind!r} is not known; there are {choices(ACTIVATIONS)}")
        if fusion not in (0, 1, 2):
            raise UnsupportedFormError(f"swiglu_fusion={fusion} is not known; there are 0, 1 and 2")
        if self.swiglu_limit_after_activation and kind != "swiglu":
            raise UnsupportedFormError(
                f"swiglu_limit_after_activation=1 needs activation_type='swiglu', and not {kind!r}"
            )
        if kind in ("swiglu", "geglu") and fusion and separate:
            raise UnsupportedFormError(f"swiglu_fusion={fusion} says that FC1 holds FC3; leave fc3_experts_weights out")
        if kind == "swiglu" and not fusion and not separate:
            raise UnsupportedFormError(
                "swiglu with swiglu_fusion=0 needs fc3_experts_weights; where FC1 holds both, set swiglu_fusion"
            )
        if kind == "geglu" and not fusion:
            raise UnsupportedFormError("activation_type='geglu' needs swiglu_fusion=1 or 2")

    def of(self, op: FunctionEmitter, h: str, linear: str | None) -> str:
        """The hidden units, from the results of FC1 and FC3."""
        kind = self.activation_type
        if linear is None and kind in ("swiglu", "geglu"):
            h, linear = interleaved(op, h) if self.swiglu_fusion == 1 else halves(op, h)
        if kind == "swiglu":
            assert linear is not None
            limit = self.swiglu_limit
            return swiglu(
                op, h, linear, self.activation_alpha, self.activation_beta, limit, self.swiglu_limit_after_activation
            )
        plain: dict[str, Callable[[str], str]] = {
            "relu": op.Relu,
            "gelu": lambda x: gelu_formula(op, x, "tanh"),
            "geglu": lambda x: gelu_formula(op, x, "tanh"),
            "silu": lambda x: op.Mul(x, op.Sigmoid(x)),
            "relu2": lambda x: op.Mul(op.Relu(x), op.Relu(x)),
            "identity": lambda x: x,
        }
        gate = plain[kind](h)
        return str(gate if linear is None else op.Mul(gate, linear))


def swiglu(
    op: FunctionEmitter,
    gate: str,
    linear: str,
    alpha: float,
    beta: float,
    limit: float | None,
    after: int = 0,
    rounded: str | None = None,
) -> str:
    """G·σ(α·G)·(L + β), with G and L clamped at the limit; `after`: the first product, and not G, is

    :param rounded: a value of the type that the first product is rounded to.
    """
    if limit is not None:
        if not after:
            gate = op.Min(gate, op.const(limit, like=gate))
        linear = op.Clip(linear, *(op.const(bound, like=linear) for bound in (-limit, limit)))
    activated = op.Mul(gate, op.Sigmoid(gate if alpha == 1 else op.Mul(gate, alpha)))
    if limit is not None and after:
        activated = op.Min(activated, op.const(limit, like=gate))
    if rounded is not None:
        activated = op.CastLike(op.CastLike(activated, rounded), gate)
    return str(op.Mul(activated, op.Add(linear, beta) if beta else linear))


def interleaved(op: FunctionEmitter, x: str) -> tuple[str, str]:
    """Every other element of the last axis, from the first and from the second on."""
    first, second = (op.Slice(x, [start], [END], [-1], [2]) for start in (0, 1))
    return first, second


@dataclass(frozen=True)
class ExpertLayer:
    """A product of an expert: the names of its weights and its bias, of all experts outside of the Scan and of one in it."""

    weights: str
    bias: str | None

    @property
    def parts(self) -> list[str]:
        """The tensors that there are; each has a slice per expert."""
        return [self.weights] if self.bias is None else [self.weights, self.bias]

    def of(self, parts: list[str]) -> ExpertLayer:
        """The layer of one expert, whose slices are the next of `parts`."""
        return replace(self, weights=parts.pop(0), bias=None if self.bias is None else parts.pop(0))

    def columns(self, shapes: Shapes) -> Size:
        """The columns of the weights, as far as they are known."""
        return sizes(shapes, self.weights, 3)[2]

    def check(self, shapes: Shapes, name: str, experts: Size, rows: Size, columns: Size) -> None:
        """Refuse weights and a bias of the product called `name` that have other sizes."""
        check_shape(shapes, f"{name}_experts_weights", self.weights, (experts, rows, columns))
        check_shape(shapes, f"{name}_experts_bias", self.bias, (experts, rows))

    def apply(self, op: FunctionEmitter, x: str) -> str:
        """x·Wᵀ + b"""
        return op.Gemm(x, self.weights, self.bias, transB=1)


@dataclass(frozen=True)
class QuantizedLayer(ExpertLayer):
    """One whose weights are integers of so many bits, packed in bytes; of a block or a row of them each has a scale.

    They are dequantized in the step that uses them: (weights − zero_points)·scales, the zero point being half the range where
    there is none.
    """

    scales: str
    zero_points: str | None
    bits: int
    block_size: int

    @property
    def parts(self) -> list[str]:
        """The tensors that there are; each has a slice per expert."""
        return [*super().parts, self.scales, *([] if self.zero_points is None else [self.zero_points])]

    def of(self, parts: list[str]) -> QuantizedLayer:
        """The layer of one expert, whose slices are the next of `parts`."""
        layer = super().of(parts)
        assert isinstance(layer, QuantizedLayer)
        scales = parts.pop(0)
        return replace(layer, scales=scales, zero_points=None if self.zero_points is None else parts.pop(0))

    def columns(self, shapes: Shapes) -> Size:
        """The columns of the weights, as far as they are known."""
        return product(super().columns(shapes), 8 // self.bits)

    def check(self, shapes: Shapes, name: str, experts: Size, rows: Size, columns: Size) -> None:
        """Refuse weights, a bias, scales and zero points of the product called `name` that have other sizes."""
        given = f"{self.bits} bits" + (f" and block_size={self.block_size}" if self.block_size else "")
        if columns is not None and (columns % (self.block_size or 1) or columns * self.bits % 8):
            raise UnsupportedFormError(f"{name}_experts_weights has rows of {columns}; {given} do not divide them")
        bytes_ = None if columns is None else columns * self.bits // 8
        check_shape(shapes, f"{name}_experts_weights", self.weights, (experts, rows, bytes_), given=given)
        check_shape(shapes, f"{name}_experts_bias", self.bias, (experts, rows))
        of_row = () if not self.block_size else (None if columns is None else columns // self.block_size,)
        grouped = experts, rows, *of_row
        check_shape(shapes, f"{name}_scales", self.scales, grouped, given=given)
        last = None if grouped[-1] is None else -(-grouped[-1] * self.bits // 8)
        check_shape(shapes, f"{name}_zero_points", self.zero_points, (*grouped[:-1], last), given=given)

    def apply(self, op: FunctionEmitter, x: str) -> str:
        """x·Wᵀ + b"""
        # Of a size that only the run knows: so the backward pass dequantizes again, and does not store what all experts have.
        nothing = op.Mul(op.Shape(x, end=1), 0)
        packed, scales = (
            op.Reshape(part, op.Add(op.Shape(part), nothing), allowzero=1) for part in (self.weights, self.scales)
        )
        scales = op.CastLike(scales, x)
        codes = op.CastLike(unpacked(op, packed, self.bits, 1), x)
        if self.zero_points is None:
            zero_points = op.const(2 ** (self.bits - 1), like=x)
        else:
            axis = 1 if self.block_size else 0
            points = unpacked(op, self.zero_points, self.bits, axis)
            count = op.Shape(scales, start=axis, end=axis + 1)  # the last byte may hold fewer
            zero_points = op.Unsqueeze(op.CastLike(op.Slice(points, [0], count, [axis]), x), [axis + 1])
        if self.block_size:
            codes = op.Reshape(codes, [0, -1, self.block_size])
        weights = op.Mul(op.Sub(codes, zero_points), op.Unsqueeze(scales, [-1]))
        return op.Gemm(x, op.Reshape(weights, [0, -1]) if self.block_size else weights, self.bias, transB=1)


def unpacked(op: FunctionEmitter, packed: str, bits: int, axis: int) -> str:
    """The numbers of 2, 4 or 8 bits along the last axis of bytes, which is `axis`; the lowest bits of a byte are the first."""
    if bits == 8:
        return packed
    shifts = op.const(np.arange(0, 8, bits, dtype=np.uint8))
    apart = op.BitShift(op.Unsqueeze(packed, [axis + 1]), shifts, direction="RIGHT")
    low = op.Mod(apart, op.const(np.array(2**bits, np.uint8)))
    return op.Reshape(low, [0] * axis + [-1])


def _layers(args: Arguments) -> tuple[ExpertLayer, ExpertLayer, ExpertLayer | None]:
    """The products of an expert of MoE; the third one may be left out."""
    one, two, three = (
        ExpertLayer(getattr(args, f"{name}_experts_weights"), getattr(args, f"{name}_experts_bias"))
        for name in ("fc1", "fc2", "fc3")
    )
    return one, two, three if args.fc3_experts_weights is not None else None


def _check_moe(shapes: Shapes, args: Arguments) -> None:
    check_experts(shapes, args, _layers(args))
    check_routing(shapes, args)


@body("MoE", "output", check=_check_moe, domain=MICROSOFT)
def moe(
    op: FunctionEmitter,
    input: str,
    router_probs: str,
    fc1_experts_weights: str,
    fc1_experts_bias: str | None,
    fc2_experts_weights: str,
    fc2_experts_bias: str | None = None,
    fc3_experts_weights: str | None = None,
    fc3_experts_bias: str | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    k: int = 1,
    normalize_routing_weights: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
) -> str:
    """Σ wₑ·(activation(x·W1ₑᵀ + b1ₑ)·W2ₑᵀ + b2ₑ) over the k experts e of the largest router_probs, w their softmax"""
    args = Arguments(**locals())
    chosen, weights = routed(op, router_probs, k, normalize_routing_weights, use_sparse_mixer)
    return mixed(op, input, chosen, weights, _layers(args), Activation.of_node(args))


def check_experts(
    shapes: Shapes,
    args: Arguments,
    layers: tuple[ExpertLayer, ExpertLayer, ExpertLayer | None],
    router_weights: Any = None,
) -> None:
    """Refuse an activation that there is not, and tokens, logits and layers that do not fit each other."""
    activation = Activation.of_node(args)
    activation.check(layers[2] is not None)
    check_shape(shapes, "input", args.input, (None, None), (None, None, None))
    *tokens, hidden = sizes(shapes, args.input, shapes.rank(args.input) or 2)
    every = (sizes(shapes, layer.weights, 3)[0] for layer in layers if layer)
    experts = first(sizes(shapes, args.router_probs, 2)[1], *every)
    check_shape(shapes, "router_probs", args.router_probs, (product(*tokens), experts))
    check_shape(shapes, "router_weights", router_weights, (product(*tokens), experts))
    one, two, three = layers
    hidden = first(hidden, one.columns(shapes), sizes(shapes, two.weights, 3)[1])
    units = two.columns(shapes)
    fused = 2 if activation.activation_type in ("swiglu", "geglu") and activation.swiglu_fusion else 1
    two.check(shapes, "fc2", experts, hidden, units)
    one.check(shapes, "fc1", experts, product(fused, units), hidden)
    if three is not None:
        three.check(shapes, "fc3", experts, units, hidden)


def check_routing(shapes: Shapes, args: Arguments, router_weights: Any = None) -> None:
    """Refuse a number of experts that a token cannot choose, and what the sparse mixer does not know."""
    experts = sizes(shapes, args.router_probs, 2)[1]
    if not 1 <= args.k < 2**31 or (experts is not None and args.k > experts):
        most = "the number of experts" if experts is None else f"the {experts} experts"
        raise UnsupportedFormError(f"k={args.k}: a token chooses 1 expert or more, up to {most}")
    if not args.use_sparse_mixer:
        return
    if router_weights is not None:
        raise UnsupportedFormError("router_weights has no meaning with use_sparse_mixer=1; leave one out")
    if args.k != 2:
        raise UnsupportedFormError(
            f"use_sparse_mixer=1 with k={args.k} has no meaning: the sparse mixer chooses 2 experts"
        )
    if args.normalize_routing_weights:
        raise UnsupportedFormError(
            "normalize_routing_weights=1 has no meaning with use_sparse_mixer=1, whose weights are two softmaxes"
        )


def routed(
    op: FunctionEmitter, logits: str, k: int, normalize: int, sparse: int, values: str | None = None
) -> tuple[str, str]:
    """The k experts that each token chooses and their weights, both (tokens, k)

    :param values: what the weights are of, in place of the softmax of `logits`.
    """
    largest, chosen = op.TopK(logits, [k], outputs=2)
    if values is not None:
        weights = op.GatherElements(values, chosen, axis=1)
        return chosen, normalized(op, weights) if normalize else weights
    if sparse:
        return chosen, _sparsely_mixed(op, logits, largest, chosen)
    if normalize:
        return chosen, op.Softmax(largest, axis=-1)
    return chosen, op.GatherElements(op.Softmax(logits, axis=-1), chosen, axis=1)


def normalized(op: FunctionEmitter, weights: str, epsilon: float = 0.0) -> str:
    """Each row divided by its sum plus ε; a row whose divisor is 0 is 0."""
    total = op.reduce("ReduceSum", weights, [1])
    if epsilon:
        total = op.Add(total, epsilon)
    empty = op.Equal(total, 0.0)
    shares = op.Div(weights, op.Where(empty, op.const(1.0, like=weights), total))
    return str(op.Where(empty, op.const(0.0, like=weights), shares))


def _sparsely_mixed(op: FunctionEmitter, logits: str, largest: str, chosen: str) -> str:
    """For each of two experts, its share in the softmax over the logits that are close to its own; the second without the first

    Close: max − x ≤ 2·jitter·max(|x|, max) (Liu et al. 2023, "Sparse Backpropagation for MoE Training")
    """
    size, rest = op.Abs(logits), logits
    lowest = op.const(-math.inf, like=logits)
    shares = []
    for place in range(2):
        top = op.Slice(largest, [place], [place + 1], [1])
        far = op.Greater(op.Sub(top, logits), op.Mul(op.Max(size, top), 2 * JITTER))
        expert = op.Slice(chosen, [place], [place + 1], [1])
        shares.append(op.GatherElements(op.Softmax(op.Where(far, lowest, rest), axis=-1), expert, axis=1))
        rest = op.ScatterElements(rest, expert, op.Expand(lowest, op.Shape(expert)), axis=1)
    return op.Concat(*shares, axis=1)


def mixed(
    op: FunctionEmitter,
    input: str,
    chosen: str,
    weights: str,
    layers: tuple[ExpertLayer, ExpertLayer, ExpertLayer | None],
    activation: Activation,
) -> str:
    """The sum of what the chosen experts make of each token, times their weights."""
    tokens = op.Flatten(input, axis=-1)
    experts = op.up_to(op.Shape(layers[0].weights, end=1))
    given = [layer for layer in layers if layer is not None]

    def step(op: FunctionEmitter, states: list[str], slices: list[str]) -> list[str]:
        expert, *parts = slices
        first, second, *third = (layer.of(parts) for layer in given)
        places = op.Transpose(
            op.NonZero(op.Equal(chosen, expert)), perm=[1, 0]
        )  # (row, rank) of each token that chose it
        rows = op.Slice(places, [0], [1], [1])
        x = op.GatherND(tokens, rows)
        linear = third[0].apply(op, x) if third else None
        y = second.apply(op, activation.of(op, first.apply(op, x), linear))
        share = op.Unsqueeze(op.GatherND(weights, places), [1])
        added = op.Mul(y, share)
        added = op.Cast(added, to=TensorProto.FLOAT) if narrow else added
        return [op.ScatterND(states[0], rows, added, reduction="add")]

    slices = [experts, *(part for layer in given for part in layer.parts)]
    narrow = op.type(tokens) in SIXTEEN_BIT  # the sum is in float, and rounded once
    zero = op.const(np.array(0, np.float32)) if narrow else op.const(0.0, like=tokens)
    [y] = op.scan(step, [op.ranked(op.Expand(zero, op.Shape(tokens)), 2)], slices)
    y = op.Reshape(y, op.Shape(input), allowzero=1)
    return op.CastLike(y, input) if narrow else y


_CODES = "fc1_experts_weights"
_SCALES = "fc1_scales"
_LAYOUTS = "the weights are in a layout of the processor; leave them in rows, weights_prepacked=0"


_FLOAT_SCALES = ("global_scale", "act_scale", "act_block_scale")


def _check_qmoe(shapes: Shapes, args: Arguments) -> None:
    if args.quant_type != "int":
        raise UnsupportedFormError(
            f"quant_type={args.quant_type!r} is not covered; quantize to integers, quant_type='int'"
        )
    if any(getattr(args, f"{name}_{kind}") is not None for name in ("fc1", "fc2") for kind in _FLOAT_SCALES):
        raise UnsupportedFormError(
            "global scales and scales of activations belong to weights that are floats; leave them out"
        )
    if args.weights_prepacked not in (-1, 0):
        raise UnsupportedFormError(f"weights_prepacked={args.weights_prepacked} is not covered: {_LAYOUTS}")
    layers = _quantized_layers(args)
    for name, layer in zip(("fc1", "fc2", "fc3"), layers, strict=True):
        if layer is None:
            continue
        if layer.bits not in (2, 4, 8):
            raise UnsupportedFormError(
                f"{name}_expert_weight_bits is {layer.bits}; weights of 2, 4 and 8 bits are covered"
            )
        if layer.scales is None:
            raise UnsupportedFormError(f"it lacks the input {name}_scales, which weights of integers need")
        if layer.block_size and not is_block_size(layer.block_size):
            raise UnsupportedFormError(f"block_size is {layer.block_size}; {BLOCKS}, or 0 for a scale of each row")
    check_experts(shapes, args, layers, args.router_weights)
    check_routing(shapes, args, args.router_weights)


def _quantized_layers(args: Arguments) -> tuple[QuantizedLayer, QuantizedLayer, QuantizedLayer | None]:
    """The products of an expert of QMoE; the third one may be left out."""
    one, two, three = (
        QuantizedLayer(
            getattr(args, f"{name}_experts_weights"),
            getattr(args, f"{name}_experts_bias"),
            getattr(args, f"{name}_scales"),
            getattr(args, f"{name}_zero_points"),
            args.expert_weight_bits if (own := getattr(args, f"{name}_expert_weight_bits")) is None else own,
            args.block_size or 0,
        )
        for name in ("fc1", "fc2", "fc3")
    )
    return one, two, three if args.fc3_experts_weights is not None else None


@body(
    "QMoE",
    "output",
    types={
        _CODES: ("tensor(uint8)", "tensor(float8e4m3fn)"),
        _SCALES: (*FLOATS, "tensor(float8e8m0)", "tensor(float8e4m3fn)"),
        **dict.fromkeys(("fc2_experts_weights", "fc3_experts_weights"), _CODES),
        **dict.fromkeys(("fc1_zero_points", "fc2_zero_points", "fc3_zero_points"), _CODES),
        **dict.fromkeys(("fc2_scales", "fc3_scales", "fc1_act_block_scale", "fc2_act_block_scale"), _SCALES),
        "fc1_global_scale": ("tensor(float)",),
        **dict.fromkeys(("fc2_global_scale", "fc1_act_scale", "fc2_act_scale"), "fc1_global_scale"),
    },
    check=_check_qmoe,
    domain=MICROSOFT,
)
def qmoe(
    op: FunctionEmitter,
    input: str,
    router_probs: str,
    fc1_experts_weights: str,
    fc1_scales: str | None,
    fc1_experts_bias: str | None,
    fc2_experts_weights: str,
    fc2_scales: str | None = None,
    fc2_experts_bias: str | None = None,
    fc3_experts_weights: str | None = None,
    fc3_scales: str | None = None,
    fc3_experts_bias: str | None = None,
    fc1_zero_points: str | None = None,
    fc2_zero_points: str | None = None,
    fc3_zero_points: str | None = None,
    router_weights: str | None = None,
    fc1_global_scale: str | None = None,
    fc2_global_scale: str | None = None,
    fc1_act_scale: str | None = None,
    fc2_act_scale: str | None = None,
    fc1_act_block_scale: str | None = None,
    fc2_act_block_scale: str | None = None,
    *,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
) -> str:
    """MoE with the weights (weights − zero_points)·scales; router_weights, if given, weigh the chosen experts"""
    args = Arguments(**locals())
    chosen, weights = routed(op, router_probs, k, normalize_routing_weights, use_sparse_mixer, router_weights)
    return mixed(op, input, chosen, weights, _quantized_layers(args), Activation.of_node(args))


def _check_group_router(shapes: Shapes, args: Arguments) -> None:
    for name in ("group_topk", "n_group", "top_k", "topk_group"):
        if getattr(args, name) < 1:
            raise UnsupportedFormError(f"{name}={getattr(args, name)}: it is a number above 0")
    scored = args.logits if args.projection_weight is None else None
    last = sizes(shapes, scored, 1 if scored is None else shapes.rank(scored) or 1)[-1]
    experts = first(last, *sizes(shapes, args.expert_bias, 1))
    check_shape(shapes, "expert_bias", args.expert_bias, (experts,))
    if experts is not None and (experts % args.n_group or args.topk_group > args.n_group or args.top_k > experts):
        raise UnsupportedFormError(
            f"{experts} experts do not fit n_group={args.n_group}, topk_group={args.topk_group} and top_k={args.top_k}: "
            f"the groups divide the experts, topk_group is 1 to n_group, top_k is 1 to {experts}"
        )


@body(
    "MoEGroupRouter",
    optional=["router_probs", "selection_scores", "router_weights"],
    types={
        "expert_bias": ("tensor(float)",),
        **dict.fromkeys(("selection_scores", "router_weights"), "expert_bias"),
    },
    check=_check_group_router,
    domain=MICROSOFT,
)
def moe_group_router(
    op: FunctionEmitter,
    logits: str,
    expert_bias: str,
    projection_weight: str | None = None,
    *,
    group_topk: int = 2,
    n_group: int = 1,
    router_sentinel: float = -10000.0,
    top_k: int,
    topk_group: int = 1,
) -> tuple[str | None, ...]:
    """log σ(logits) at the top_k experts by σ(logits) + expert_bias in the best topk_group groups, router_sentinel elsewhere

    Besides, σ(logits) + expert_bias and σ(logits) of all experts, where there is one group.
    """
    x = op.CastLike(op.Flatten(logits, axis=-1), expert_bias)
    if projection_weight is not None:
        x = op.MatMul(x, op.Transpose(op.CastLike(projection_weight, expert_bias), perm=[1, 0]))
    scores = op.Sigmoid(x)
    biased = op.Add(scores, expert_bias)
    whole = (biased, scores) if n_group == topk_group == 1 else (None, None)
    if projection_weight is not None:
        return None, *whole
    ranked = biased
    if topk_group < n_group:
        ranked = _in_best_groups(op, biased, group_topk, n_group, topk_group)
    hidden = op.const(-math.inf, like=expert_bias)
    _, chosen = op.TopK(ranked, [top_k], outputs=2)
    selected = op.And(_marked(op, chosen, ranked), op.Greater(ranked, hidden))
    logs = op.CastLike(op.Log(op.Max(scores, op.const(1e-20, like=expert_bias))), logits)
    return op.Where(selected, logs, op.const(router_sentinel, like=logits)), *whole


def _in_best_groups(op: FunctionEmitter, biased: str, group_topk: int, n_group: int, topk_group: int) -> str:
    """`biased` (tokens, experts), and −∞ outside of the groups whose largest numbers add up to most."""
    each = op.Div(op.Shape(biased, start=1), [n_group])
    grouped = op.Reshape(biased, op.Concat(op.Shape(biased, end=1), [n_group], each, axis=0), allowzero=1)
    largest, _ = op.TopK(grouped, op.Min(each, op.const([group_topk])), outputs=2)
    totals = op.Reshape(op.reduce("ReduceSum", largest, [2]), [0, n_group])
    _, best = op.TopK(totals, [topk_group], outputs=2)
    within = op.Where(op.Unsqueeze(_marked(op, best, totals), [2]), grouped, op.const(-math.inf, like=biased))
    return op.Reshape(within, op.Shape(biased), allowzero=1)


def _marked(op: FunctionEmitter, chosen: str, like: str) -> str:
    """True at the indices `chosen` of every row of `like`, False elsewhere."""
    shape = op.Shape(like)
    nothing = op.Expand(op.const(np.array(0)), shape)
    ones = op.Expand(op.const(np.array(1)), op.Shape(chosen))
    return op.Greater(op.ScatterElements(nothing, chosen, ones, axis=1), 0)


@body("SwiGLU", "output", domain=MICROSOFT)
def swiglu_body(
    op: FunctionEmitter,
    gate: str,
    up: str | None = None,
    *,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    round_activation: int = 0,
) -> str:
    """G·σ(α·G)·(L + β), G = min(gate, limit), L = up clamped to ±limit; without up, gate holds both, gate first"""
    narrow = op.type(gate) in SIXTEEN_BIT
    g, linear = halves(op, gate) if up is None else (gate, up)
    g, linear = (op.wide(x) for x in (g, linear))
    between = gate if narrow and round_activation else None
    y = swiglu(op, g, linear, activation_alpha, activation_beta, limit if limit > 0 else None, rounded=between)
    return str(op.CastLike(y, gate)) if narrow else y


def _check_router_gate_up_proj(shapes: Shapes, args: Arguments) -> None:
    if args.activation != "swiglu":
        raise UnsupportedFormError(f"its activation {args.activation!r} is not known; there is 'swiglu'")
    if args.router_size < 0:
        raise UnsupportedFormError(f"router_size={args.router_size}: it is a number of columns")


@body("RouterGateUpProj", "router", "activated", check=_check_router_gate_up_proj, domain=MICROSOFT)
def router_gate_up_proj(
    op: FunctionEmitter,
    X: str,
    W: str,
    *,
    activation: str = "swiglu",
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    limit: float = 0.0,
    router_size: int,
) -> tuple[str, str]:
    """X·W: its first router_size columns, and SwiGLU of the others"""
    y = op.MatMul(X, W)
    options: dict[str, Any] = {
        "activation_alpha": activation_alpha,
        "activation_beta": activation_beta,
        "limit": limit,
    }
    rest = op.Slice(y, [router_size], [END], [-1])
    if op.type(X):  # a part of the product has its type
        op.types[rest] = op.type(X), None
    return op.Slice(y, [0], [router_size], [-1]), swiglu_body(op, rest, **options)

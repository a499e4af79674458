"""What a random graph is made of: a template adds one operator of a family, with operands and attributes that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper

from refgrad.conformance.fuzzing.graphs.functions import call, define
from refgrad.conformance.fuzzing.graphs.growing import (
    BOOL,
    DOUBLE,
    FLOAT,
    INT64,
    OPTIONAL,
    MisfitError,
    Scope,
    Value,
)

NEWEST = 99
TEMPLATES: list[tuple[Callable[[Scope], Any], float, int, int]] = []


def template(weight: float = 1.0, since: int = 1, until: int = NEWEST) -> Callable[[Callable[[Scope], Any]], Any]:
    """Register a template of the opsets `since` to `until`."""

    def register(function: Callable[[Scope], Any]) -> Any:
        TEMPLATES.append((function, weight, since, until))
        return function

    return register


def axis_of(s: Scope, rank: int) -> int:
    """An axis of a rank, counted from either end."""
    axis = s.rng.randrange(rank)
    return axis - rank if s.chance(0.3) else axis


def axes_of(s: Scope, rank: int, least: int = 1) -> list[int]:
    """Some axes of a rank."""
    chosen = s.rng.sample(range(rank), s.rng.randint(min(least, rank), rank))
    return [axis - rank if s.chance(0.3) else axis for axis in chosen]


# Elementwise


@template(3)
def _smooth(s: Scope) -> None:
    s.add(
        s.rng.choice(("Tanh", "Sigmoid", "Sin", "Cos", "Erf", "Softplus", "Neg", "Atan", "Asinh", "Identity")), s.pick()
    )


@template(1.5)
def _growing(s: Scope) -> None:
    s.add(s.rng.choice(("Exp", "Sinh", "Cosh")), s.calm(s.pick(), 2.5))


@template(1.5)
def _of_positive(s: Scope) -> None:
    s.add(s.rng.choice(("Log", "Sqrt", "Reciprocal")), s.positive(s.pick()))


@template()
def _bounded(s: Scope) -> None:
    x = s.pick()
    if x.array.size and np.max(np.abs(x.real)) > 0.9:
        x = s.add("Mul", s.add(s.rng.choice(("Tanh", "Sin")), x), s.number(0.75))
    op = s.rng.choice(("Acos", "Asin", "Atanh", "Tan"))
    s.add(op, x)


@template(0.4)
def _hyperbolic(s: Scope) -> None:
    s.add("Acosh", s.add("Add", s.positive(s.pick()), s.number(1.0)))


@template(3)
def _kinked(s: Scope) -> None:
    op = s.rng.choice(
        (
            "Relu",
            "Abs",
            "LeakyRelu",
            "Elu",
            "Selu",
            "Celu",
            "HardSigmoid",
            "Softsign",
            "ThresholdedRelu",
            "Shrink",
            "HardSwish",
        )
    )
    if op == "HardSwish" and s.opset < 14:
        raise MisfitError(op)
    alphas: dict[str, dict[str, Any]] = {
        "LeakyRelu": {"alpha": 0.2},
        "Elu": {"alpha": 1.5},
        "Celu": {"alpha": 0.7},
        "Selu": {"alpha": 1.2, "gamma": 0.9},
        "HardSigmoid": {"alpha": 0.4, "beta": 0.3},
        "ThresholdedRelu": {"alpha": 0.3},
        "Shrink": {"bias": 0.2, "lambd": 0.4},
    }
    x = s.pick()
    if op in ("Elu", "Selu", "Celu"):
        x = s.calm(x, 20.0)
    s.add(op, x, **(alphas.get(op, {}) if s.chance(0.5) else {}))


@template(1, 18)
def _mish(s: Scope) -> None:
    s.add("Mish", s.pick())


@template(1.2, 20)
def _gelu(s: Scope) -> None:
    s.add("Gelu", s.pick(), approximate=s.rng.choice((None, "none", "tanh")))


@template(0.7, 24)
def _swish(s: Scope) -> None:
    s.add("Swish", s.pick(), alpha=s.rng.choice((None, 0.7)))


@template(0.8)
def _prelu(s: Scope) -> None:
    x = s.pick(1)
    slope = s.uniform(tuple(d if s.chance(0.6) else 1 for d in x.shape)[s.rng.randint(0, x.rank - 1) :], -0.8, 0.8)
    s.add("PRelu", x, slope)


@template()
def _clip(s: Scope) -> None:
    x = s.pick()
    low = s.number(-0.7) if s.chance(0.7) else None
    high = s.uniform((), 0.4, 1.0) if s.chance(0.4) else s.number(0.9) if s.chance(0.7) else None
    s.add("Clip", x, low, high)


@template(5)
def _binary(s: Scope) -> None:
    x = s.pick()
    y = s.broadcasting(x.shape)
    if s.chance(0.5):
        x, y = y, x
    op = s.rng.choice(("Add", "Sub", "Mul", "Mul", "Div"))
    s.add(op, x, s.positive(y) if op == "Div" else y)


@template(1.5)
def _variadic(s: Scope) -> None:
    x = s.pick()
    others = [s.broadcasting(x.shape) for _ in range(s.rng.randint(0, 2))]
    s.add(s.rng.choice(("Max", "Min", "Sum", "Mean")), x, *others)


@template(1.5)
def _power(s: Scope) -> None:
    x = s.calm(s.pick())
    match s.rng.randrange(4):
        case 0:
            s.add("Pow", x, s.number(s.rng.choice((2.0, 3.0, 1.0, 0.0))))
        case 1:
            s.add("Pow", s.positive(x), s.calm(s.broadcasting(x.shape), 2.0))
        case 2:
            s.add("Pow", s.positive(x), s.number(s.rng.choice((0.5, -1.0, 1.5))))
        case 3:
            s.add("Pow", x, s.leaf(np.array(s.rng.choice((2, 3)))), kind=s.world.kind)


@template(0.6)
def _modulo(s: Scope) -> None:
    s.add("Mod", s.pick(), s.uniform((), 0.6, 1.5, moves=False), fmod=1)


@template(0.5)
def _rounding(s: Scope) -> None:
    x = s.pick()
    s.add("Mul", s.add(s.rng.choice(("Floor", "Ceil", "Round", "Sign")), x), x)


@template(2)
def _where(s: Scope) -> None:
    x = s.pick()
    y = s.broadcasting(x.shape)
    s.add("Where", condition(s, x), x, y)


def condition(s: Scope, x: Value) -> Value:
    """A truth value that broadcasts with `x`."""
    match s.rng.randrange(4):
        case 0:
            return s.leaf(s.world.numbers.random(x.shape) < 0.5)
        case 1:
            return s.add(s.rng.choice(("Greater", "Less")), x, s.number(0.05), kind=BOOL)
        case 2:
            return s.add(
                s.rng.choice(("GreaterOrEqual", "LessOrEqual")), s.broadcasting(x.shape), s.number(0.05), kind=BOOL
            )
    return s.leaf(np.array(s.chance(0.5)))


@template(0.8)
def _cast(s: Scope) -> None:
    other = s.rng.choice([kind for kind in (FLOAT, DOUBLE) if kind != s.world.kind])
    x = s.pick()
    wide = s.add("Cast", x, kind=other, to=other)
    moved = s.add(s.rng.choice(("Tanh", "Neg")), wide, kind=other)
    if s.chance(0.3) and s.opset >= 15:
        s.add("CastLike", moved, x, kind=s.world.kind)
    else:
        s.add("Cast", moved, kind=s.world.kind, to=s.world.kind)


@template(0.5)
def _dropout(s: Scope) -> None:
    s.add("Dropout", s.pick())


# Reductions


@template(4)
def _reduction(s: Scope) -> None:
    op = s.rng.choice(
        (
            "ReduceSum",
            "ReduceMean",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
            "ReduceL1",
            "ReduceL2",
            "ReduceLogSum",
            "ReduceLogSumExp",
            "ReduceSumSquare",
        )
    )
    x = s.pick(0, 4)
    if op == "ReduceLogSum":
        x = s.positive(x)
    if op == "ReduceL2":
        x = s.positive(x) if s.chance(0.5) else x
    keep = s.rng.choice((None, 0, 1))
    if not x.rank or s.chance(0.2):
        y = s.add(op, x, keepdims=keep)
    else:
        axes = axes_of(s, x.rank)
        as_input = s.opset >= 18 or op == "ReduceSum"
        if as_input:
            noop = s.rng.choice((None, 1)) if s.chance(0.2) else None
            given = s.ints(axes) if s.chance(0.9) else None
            y = s.add(op, x, given, keepdims=keep, noop_with_empty_axes=noop)
        else:
            y = s.add(op, x, axes=axes, keepdims=keep)
    if op == "ReduceL2" and y.array.size and np.min(y.real) < 0.1:
        raise MisfitError("a root near 0")


@template()
def _cumulative(s: Scope) -> None:
    x = s.pick(1)
    axis = s.leaf(np.array(axis_of(s, x.rank), s.rng.choice((np.int64, np.int32))))
    s.add("CumSum", x, axis, exclusive=s.rng.choice((None, 1)), reverse=s.rng.choice((None, 1)))


@template()
def _topk(s: Scope) -> None:
    x = s.pick(1, filled=True)
    axis = axis_of(s, x.rank)
    k = s.rng.randint(1, x.shape[axis])
    _values, _ = s.add_all(
        "TopK", x, s.ints([k]), outputs=2, axis=axis, largest=s.rng.choice((None, 0)), named=[True, True]
    )
    if s.chance(0.3):
        s.add("GatherElements", s.like(x.shape), _, axis=axis)


@template(0.5)
def _arg(s: Scope) -> None:
    x = s.pick(1, filled=True)
    axis = axis_of(s, x.rank)
    found = s.add(s.rng.choice(("ArgMax", "ArgMin")), x, axis=axis, keepdims=1)
    s.add("GatherElements", s.like(x.shape), found, axis=axis)


@template(0.4)
def _einsum_trace(s: Scope) -> None:
    x = s.pick(2, 3, lambda v: v.shape[-1] == v.shape[-2])
    s.add("Einsum", x, equation="ii->i" if x.rank == 2 else "bii->b")


# Linear


@template(3)
def _matmul(s: Scope) -> None:
    a = s.pick(1, 4)
    n = s.rng.choice((1, 2, 3))
    form = s.rng.randrange(4)
    if form == 0 or a.rank == 1:
        b = s.like((a.shape[-1], n) if s.chance(0.7) else (a.shape[-1],))
    elif form == 1:
        b = s.like((*a.shape[:-2], a.shape[-1], n))
    elif form == 2:
        b = s.like((2, a.shape[-1], n)) if a.rank == 2 else s.like((a.shape[-1], n))
    else:
        b = s.add("Transpose", a, perm=[*range(a.rank - 2), a.rank - 1, a.rank - 2])
    s.add("MatMul", s.calm(a, 10), s.calm(b, 10))


@template(2)
def _gemm(s: Scope) -> None:
    a = s.pick(2, 2)
    ta, tb = s.chance(0.4), s.chance(0.4)
    m, k = a.shape[::-1] if ta else a.shape
    n = s.rng.choice((1, 2, 3))
    b = s.like((n, k) if tb else (k, n))
    c = (
        s.broadcasting(
            (m, n), lambda v: v.rank <= 2 and all(x in (1, y) for x, y in zip(reversed(v.shape), (n, m), strict=False))
        )
        if s.chance(0.7)
        else None
    )
    if c is not None and not all(x in (1, y) for x, y in zip(reversed(c.shape), (n, m), strict=False)):
        raise MisfitError("C")
    s.add(
        "Gemm",
        a,
        b,
        c,
        transA=int(ta) or None,
        transB=int(tb) or None,
        alpha=s.rng.choice((None, 0.5)),
        beta=s.rng.choice((None, 1.5)),
    )


@template(2)
def _einsum(s: Scope) -> None:
    sizes = dict(zip("abcdij", (s.rng.choice((1, 2, 3)) for _ in range(6)), strict=True))
    equation = s.rng.choice(
        (
            "ij,ja->ia",
            "ij,ij->",
            "ij->ji",
            "bij,bja->bia",
            "ij,j->i",
            "i,j->ij",
            "ij,ja,ab->ib",
            "ij->",
            "bij->bj",
            "ij,ij->ij",
            "ij,ja",
            "bij,aj->bai",
            "i,i",
            "...ij,...ja->...ia",
            "...i->...",
            "ij,jk->ik",
            "abi,aci->abci",
        )
    )
    sizes["k"] = 2
    head = [2] if s.chance(0.5) else []
    x = s.pick(2, 3) if s.chance(0.5) else None
    terms = equation.split("->")[0].split(",")
    operands = []
    for k, term in enumerate(terms):
        if k == 0 and x is not None and x.rank == len(term) and len(set(term)) == len(term) and "." not in term:
            sizes |= dict(zip(term, x.shape, strict=True))
            operands.append(x)
            continue
        shape = [*(head if "..." in term else []), *(sizes[c] for c in term.replace("...", ""))]
        operands.append(s.like(shape))
    s.add("Einsum", *operands, equation=equation)


@template(0.5)
def _determinant(s: Scope) -> None:
    x = s.pick(2, 3, lambda v: v.shape[-1] == v.shape[-2] <= 4)
    s.add("Det", s.calm(x))


# Shapes


@template(2)
def _reshape(s: Scope) -> None:
    x = s.pick()
    wanted = _factors(s, x.array.size)
    given: list[int] = list(wanted)
    if x.array.size and s.chance(0.3) and given:
        given[s.rng.randrange(len(given))] = -1
    elif x.rank and given and given[0] == x.shape[0] and x.array.size:
        given[0] = 0
    s.add("Reshape", x, s.ints(given), allowzero=1 if 0 in given and not x.array.size and s.opset >= 14 else None)


def _factors(s: Scope, size: int) -> list[int]:
    """A shape of so many elements."""
    made: list[int] = []
    if not size:
        return [0, s.rng.choice((1, 2))]
    while size > 1 and len(made) < 3 and s.chance(0.8):
        found = [d for d in range(2, size + 1) if size % d == 0]
        made.append(s.rng.choice(found))
        size //= made[-1]
    if size > 1:
        made.append(size)
    if s.chance(0.2):
        made.append(1)
    s.rng.shuffle(made)
    return made


@template(1.5)
def _transpose(s: Scope) -> None:
    x = s.pick(0, 4)
    perm = list(range(x.rank))
    s.rng.shuffle(perm)
    s.add("Transpose", x, perm=perm if s.chance(0.8) and perm else None)


@template()
def _squeeze(s: Scope) -> None:
    x = s.pick(1, fits=lambda v: 1 in v.shape)
    ones = [axis for axis, size in enumerate(x.shape) if size == 1]
    s.add("Squeeze", x, s.ints(s.rng.sample(ones, s.rng.randint(1, len(ones)))) if s.chance(0.7) else None)


@template()
def _unsqueeze(s: Scope) -> None:
    x = s.pick(0, 3)
    s.add("Unsqueeze", x, s.ints([s.rng.randint(0, x.rank)]) if s.chance(0.6) else s.leaf(np.array([0, x.rank + 1])))


@template(0.7)
def _flatten(s: Scope) -> None:
    x = s.pick()
    s.add("Flatten", x, axis=s.rng.randint(-x.rank, x.rank))


@template(2)
def _concat(s: Scope) -> None:
    x = s.pick(1)
    axis = axis_of(s, x.rank)
    others = []
    for _ in range(s.rng.randint(0, 2)):
        found = s.floats(
            lambda v: (
                v.rank == x.rank
                and all(a == b for k, (a, b) in enumerate(zip(v.shape, x.shape, strict=True)) if k != axis % x.rank)
            )
        )
        others.append(s.rng.choice(found))
    s.add("Concat", x, *others, axis=axis)


@template(1.5)
def _split(s: Scope) -> None:
    x = s.pick(1, filled=True)
    axis = axis_of(s, x.rank)
    size = x.shape[axis]
    count = s.rng.randint(1, min(size, 3))
    if size % count == 0 and s.chance(0.4):
        parts = s.add_all("Split", x, outputs=count, axis=axis, num_outputs=count if s.opset >= 18 else None)
    elif s.opset >= 18 and s.chance(0.3) and (count - 1) * -(-size // count) < size:
        parts = s.add_all("Split", x, outputs=count, axis=axis, num_outputs=count)
    else:
        cuts = sorted(s.rng.randint(0, size) for _ in range(count - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        parts = s.add_all("Split", x, s.ints(sizes), outputs=count, axis=axis)
    del parts


@template(2)
def _slicing(s: Scope) -> None:
    x = s.pick(1)
    axes = axes_of(s, x.rank)
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis]
        if s.chance(0.25):
            starts.append(s.rng.choice((-1, size, 2**31)))
            ends.append(s.rng.choice((-(2**31), -size - 1)))
            steps.append(s.rng.choice((-1, -2)))
        else:
            a = s.rng.randint(0, max(size - 1, 0))
            b = s.rng.choice((size, 2**31, s.rng.randint(a, size)))
            starts.append(a - size if s.chance(0.3) and size and a else a)
            ends.append(b)
            steps.append(s.rng.choice((1, 1, 2)))
    as_axes = s.ints(axes) if axes != list(range(x.rank)) or s.chance(0.5) else None
    as_steps = s.ints(steps) if any(step != 1 for step in steps) or s.chance(0.3) else None
    if as_steps is not None and as_axes is None:
        as_axes = s.ints(axes)
    s.add("Slice", x, s.ints(starts), s.ints(ends), as_axes, as_steps)


@template()
def _expand(s: Scope) -> None:
    x = s.pick(0, 3)
    wanted = [s.rng.choice((2, 3)) if d == 1 else d for d in x.shape]
    wanted = [d if s.chance(0.8) else 1 for d in wanted]
    if s.chance(0.5):
        wanted = [s.rng.choice((1, 2)), *wanted]
    s.add("Expand", x, s.ints(wanted))


@template()
def _tile(s: Scope) -> None:
    x = s.pick(1, 3)
    s.add("Tile", x, s.ints([s.rng.choice((1, 1, 2, 3)) for _ in range(x.rank)]))


@template(1.5)
def _pad(s: Scope) -> None:
    x = s.pick(1, 4)
    modes = ["constant", "constant", "reflect", "edge"] + (["wrap"] if s.opset >= 19 else [])
    mode = s.rng.choice(modes)
    low = -1 if mode == "constant" else 0
    pads = [s.rng.randint(low, 2) for _ in range(2 * x.rank)]
    for k, size in enumerate(x.shape):
        for end in (k, k + x.rank):
            most = size - 1 if mode == "reflect" else size if mode == "wrap" else 2
            pads[end] = min(pads[end], most)
        if size + min(pads[k], 0) + min(pads[k + x.rank], 0) < 1 or (not size and mode != "constant"):
            raise MisfitError("nothing is left")
    value = s.uniform(()) if mode == "constant" and s.chance(0.5) else None
    if s.opset >= 18 and s.chance(0.3) and x.rank > 1:
        axes = sorted(s.rng.sample(range(x.rank), s.rng.randint(1, x.rank)))
        pads = [pads[a] for a in axes] + [pads[a + x.rank] for a in axes]
        s.add("Pad", x, s.ints(pads), value, s.ints(axes), mode=mode)
    else:
        s.add("Pad", x, s.ints(pads), value, mode=mode if s.chance(0.7) or mode != "constant" else None)


@template(0.8, 14)
def _trilu(s: Scope) -> None:
    x = s.pick(2)
    s.add(
        "Trilu", x, s.leaf(np.array(s.rng.randint(-2, 2))) if s.chance(0.6) else None, upper=s.rng.choice((0, 1, None))
    )


@template(0.8)
def _depth_to_space(s: Scope) -> None:
    if s.chance(0.5):
        x = s.like((s.rng.choice((1, 2)), 4, s.rng.choice((1, 2)), 2))
        s.add("DepthToSpace", x, blocksize=2, mode=s.rng.choice((None, "CRD")))
    else:
        s.add("SpaceToDepth", s.like((1, s.rng.choice((1, 2)), 2, 4)), blocksize=2)


@template(0.6)
def _reverse_sequence(s: Scope) -> None:
    x = s.pick(2, filled=True)
    time = s.rng.choice((0, 1))
    lengths = [s.rng.randint(1, x.shape[time]) for _ in range(x.shape[1 - time])]
    s.add("ReverseSequence", x, s.ints(lengths), time_axis=time, batch_axis=1 - time)


@template(0.6, 18)
def _center_crop_pad(s: Scope) -> None:
    x = s.pick(1, 3, filled=True)
    axes = sorted(s.rng.sample(range(x.rank), s.rng.randint(1, x.rank)))
    s.add("CenterCropPad", x, s.ints([s.rng.randint(1, 4) for _ in axes]), axes=axes)


# Indexing


def indices(s: Scope, shape: Any, size: int, unique: bool = False) -> Value:
    """Indices below `size`, some counted from the end."""
    if not size and math.prod(shape):
        raise MisfitError("nothing to index")
    array = s.world.numbers.integers(-size, size, tuple(shape)) if size else np.zeros(tuple(shape), np.int64)
    if s.chance(0.5):
        array = np.abs(array) % max(size, 1)
    return s.leaf(array.astype(s.rng.choice((np.int64, np.int64, np.int32))))


@template(2)
def _gather(s: Scope) -> None:
    x = s.pick(1)
    axis = axis_of(s, x.rank)
    s.add("Gather", x, indices(s, s.rng.choice(((), (1,), (3,), (2, 2))), x.shape[axis]), axis=axis)


@template()
def _gather_elements(s: Scope) -> None:
    x = s.pick(1)
    axis = axis_of(s, x.rank)
    shape = [s.rng.randint(1, max(d, 1)) for d in x.shape]
    shape[axis] = s.rng.choice((1, 2, 5))
    s.add("GatherElements", x, indices(s, shape, x.shape[axis]), axis=axis)


def _tuples(s: Scope, shape: tuple[int, ...], head: Any) -> Value:
    """Index tuples into the first axes of a shape."""
    if not math.prod(shape):
        raise MisfitError("nothing to index")
    parts = [s.world.numbers.integers(0, d, tuple(head)) - (d if s.chance(0.2) else 0) for d in shape]
    return s.leaf(np.stack(parts, axis=-1))


@template()
def _gather_nd(s: Scope) -> None:
    x = s.pick(1, 4, filled=True)
    batch = s.rng.randint(0, 1) if x.rank > 1 else 0
    last = s.rng.randint(1, x.rank - batch)
    head = [*x.shape[:batch], *s.rng.choice(((2,), (3,), (2, 2)))]
    s.add("GatherND", x, _tuples(s, x.shape[batch : batch + last], head), batch_dims=batch or None)


@template()
def _scatter_elements(s: Scope) -> None:
    x = s.pick(1, 3, filled=True)
    axis = axis_of(s, x.rank)
    reductions = [None, "add"] if s.opset >= 16 else [None]
    reduction = s.rng.choice(reductions)
    shape = [s.rng.randint(1, d) for d in x.shape]
    order = np.argsort(s.world.numbers.random(x.shape), axis=axis)
    chosen = order[tuple(slice(0, d) for d in shape)]
    s.add("ScatterElements", x, s.leaf(chosen.astype(np.int64)), s.like(shape), axis=axis, reduction=reduction)


@template()
def _scatter_nd(s: Scope) -> None:
    x = s.pick(1, 4, filled=True)
    last = s.rng.randint(1, x.rank)
    reduction = s.rng.choice([None, "add"] if s.opset >= 16 else [None])
    every = list(np.ndindex(*x.shape[:last]))
    count = s.rng.randint(1, len(every))
    chosen = np.array(s.rng.sample(every, min(count, 4)), np.int64)
    s.add("ScatterND", x, s.leaf(chosen), s.like((len(chosen), *x.shape[last:])), reduction=reduction)


@template(0.8)
def _compress(s: Scope) -> None:
    x = s.pick(1, filled=True)
    if s.chance(0.3):
        s.add("Compress", x, s.leaf(s.world.numbers.random(x.array.size) < 0.6))
    else:
        axis = axis_of(s, x.rank)
        s.add("Compress", x, s.leaf(s.world.numbers.random(x.shape[axis]) < 0.7), axis=axis)


@template(0.5)
def _one_hot(s: Scope) -> None:
    s.add(
        "OneHot",
        indices(s, (s.rng.choice((1, 3)),), 4),
        s.leaf(np.array(4)),
        s.like((2,)),
        axis=s.rng.choice((None, 0)),
        kind=s.world.kind,
    )


@template(0.5)
def _unique(s: Scope) -> None:
    x = s.pick(1, 2, filled=True)
    s.add("Unique", x)


@template(0.5)
def _nonzero(s: Scope) -> None:
    x = s.pick(1, 3, filled=True)
    where = s.add("NonZero", s.add("Greater", x, s.number(0.02)))
    s.add("GatherND", x, s.add("Transpose", where))


# Windows


@template(2.5)
def _conv(s: Scope) -> None:
    rank = s.rng.choice((1, 2, 2, 3))
    x = (
        s.pick(2 + rank, 2 + rank)
        if s.chance(0.5)
        else s.like((s.rng.choice((1, 2)), s.rng.choice((1, 2, 4)), *(s.rng.choice((3, 4, 5)) for _ in range(rank))))
    )
    group = s.rng.choice([g for g in (1, 1, 2, 4) if x.shape[1] and x.shape[1] % g == 0])
    kernel = [s.rng.choice((1, 2, 3)) for _ in range(rank)]
    made = group * s.rng.choice((1, 2))
    w = s.like((made, x.shape[1] // group, *kernel))
    b = s.like((made,)) if s.chance(0.5) else None
    s.add(
        "Conv",
        x,
        w,
        b,
        group=group if group > 1 else None,
        kernel_shape=kernel if s.chance(0.5) else None,
        strides=[s.rng.choice((1, 2)) for _ in kernel] if s.chance(0.4) else None,
        dilations=[s.rng.choice((1, 2)) for _ in kernel] if s.chance(0.3) else None,
        **_padding(s, rank),
    )


def _padding(s: Scope, rank: int, most: int = 1) -> dict[str, Any]:
    match s.rng.randrange(4):
        case 0:
            return {"auto_pad": s.rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))}
        case 1 | 2:
            return {"pads": [s.rng.randint(0, most) for _ in range(2 * rank)]}
    return {}


@template(1.2)
def _conv_transpose(s: Scope) -> None:
    rank = s.rng.choice((1, 2, 2))
    x = s.like((s.rng.choice((1, 2)), s.rng.choice((1, 2)), *(s.rng.choice((2, 3)) for _ in range(rank))))
    group = s.rng.choice([g for g in (1, 2) if x.shape[1] % g == 0])
    kernel = [s.rng.choice((1, 2, 3)) for _ in range(rank)]
    w = s.like((x.shape[1], s.rng.choice((1, 2)), *kernel))
    b = s.like((w.shape[1] * group,)) if s.chance(0.5) else None
    strides = [s.rng.choice((1, 2)) for _ in kernel]
    s.add(
        "ConvTranspose",
        x,
        w,
        b,
        group=group if group > 1 else None,
        strides=strides,
        output_padding=[stride - 1 for stride in strides] if s.chance(0.3) else None,
        dilations=[s.rng.choice((1, 2)) for _ in kernel] if s.chance(0.2) else None,
        pads=[s.rng.randint(0, 1) for _ in range(2 * rank)] if s.chance(0.4) else None,
    )


@template(2)
def _pool(s: Scope) -> None:
    rank = s.rng.choice((1, 2, 2))
    shape = (s.rng.choice((1, 2)), s.rng.choice((1, 2)), *(s.rng.choice((3, 4, 5)) for _ in range(rank)))
    x = s.pick(2 + rank, 2 + rank, lambda v: min(v.shape[2:]) > 1) if s.chance(0.5) else s.like(shape)
    op = s.rng.choice(("MaxPool", "AveragePool", "LpPool"))
    kernel = [s.rng.choice((1, 2, 3)) for _ in range(rank)]
    given: dict[str, Any] = {"kernel_shape": kernel} | _padding(s, rank)
    if s.chance(0.5):
        given["strides"] = [s.rng.choice((1, 2)) for _ in kernel]
    since = {"MaxPool": 1, "AveragePool": 19, "LpPool": 18}[op]
    if s.opset >= since and s.chance(0.2) and "auto_pad" not in given:
        given["dilations"] = [s.rng.choice((1, 2)) for _ in kernel]
    if op in ("MaxPool", "AveragePool") and s.chance(0.3) and "auto_pad" not in given:
        given["ceil_mode"] = 1
    if op == "AveragePool" and s.chance(0.4):
        given["count_include_pad"] = 1
    if op == "LpPool":
        given["p"] = s.rng.choice((1, 2, 3))
        x = s.positive(x)
    if "pads" in given and any(p >= k for p, k in zip(given["pads"], kernel * 2, strict=True)):
        del given["pads"]
    s.add(op, x, **given)


@template()
def _global_pool(s: Scope) -> None:
    x = s.pick(3, 4, filled=True)
    op = s.rng.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))
    s.add(op, s.positive(x) if op == "GlobalLpPool" else x)


@template()
def _resize(s: Scope) -> None:
    x = s.pick(3, 4, filled=True)
    mode = s.rng.choice(("nearest", "linear", "linear", "cubic"))
    if mode == "cubic" and x.rank != 4:
        raise MisfitError("cubic")
    spatial = x.rank - 2
    where = s.rng.choice(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    given: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": where}
    if mode == "nearest":
        given |= {"nearest_mode": s.rng.choice(("round_prefer_floor", "floor", "ceil", "round_prefer_ceil"))}
    if s.opset >= 18 and s.chance(0.2):
        given["antialias"] = 1 if mode != "nearest" else None
    if s.chance(0.5):
        sizes = [s.rng.choice((1, 2, 3, 5)) for _ in range(spatial)]
        s.add("Resize", x, None, None, s.ints([*x.shape[:2], *sizes]), **given)
    else:
        scales = np.array([1.0, 1.0, *(s.rng.choice((0.5, 1.0, 2.0, 1.5)) for _ in range(spatial))], np.float32)
        s.add("Resize", x, None, s.leaf(scales, FLOAT, moves=False), **given)


# Normalisations


@template()
def _batch_normalization(s: Scope) -> None:
    x = s.pick(2, 4, filled=True)
    c = x.shape[1]
    scale, bias, mean = (s.like((c,)) for _ in range(3))
    var = s.positive(s.like((c,)))
    epsilon = s.rng.choice((None, 0.1))
    if s.opset >= 14 and s.chance(0.3):
        # ONNX Runtime writes the running mean and variance over those that are given: nothing else may read them.
        mean, var = s.add("Neg", mean, hidden=True), s.add("Add", var, s.number(0.5), hidden=True)
        s.add_all("BatchNormalization", x, scale, bias, mean, var, outputs=3, training_mode=1, epsilon=0.1)
    else:
        s.add("BatchNormalization", x, scale, bias, mean, var, epsilon=epsilon)


@template()
def _instance_normalization(s: Scope) -> None:
    x = s.pick(3, 4, filled=True)
    s.add("InstanceNormalization", x, s.like(x.shape[1:2]), s.like(x.shape[1:2]), epsilon=0.1)


@template(1.5, 17)
def _layer_normalization(s: Scope) -> None:
    x = s.pick(1, 4, filled=True)
    axis = axis_of(s, x.rank)
    shape = x.shape[axis % x.rank :]
    scale = s.like(shape)
    bias = s.like(shape) if s.chance(0.6) else None
    s.add("LayerNormalization", x, scale, bias, axis=axis, epsilon=0.05)


@template(1, 23)
def _rms_normalization(s: Scope) -> None:
    x = s.pick(1, 4, filled=True)
    axis = axis_of(s, x.rank)
    s.add("RMSNormalization", x, s.like(x.shape[axis % x.rank :]), axis=axis, epsilon=0.05)


@template(1, 21)
def _group_normalization(s: Scope) -> None:
    x = s.pick(3, 4, filled=True)
    groups = s.rng.choice([g for g in (1, 2, 4) if x.shape[1] % g == 0])
    per = (x.shape[1],) if s.opset >= 21 else (groups,)
    s.add("GroupNormalization", x, s.like(per), s.like(per), num_groups=groups, epsilon=0.1)


@template(0.6)
def _mean_variance(s: Scope) -> None:
    if s.world.kind != FLOAT:
        raise MisfitError("its body adds a float32")
    x = s.pick(4, 4, filled=True) if s.chance(0.5) else s.pick(2, 3, filled=True)
    axes = [0, 2, 3] if x.rank == 4 and s.chance(0.5) else list(range(x.rank))
    s.add("MeanVarianceNormalization", x, axes=axes)


@template(0.6)
def _lp_normalization(s: Scope) -> None:
    x = s.pick(1, filled=True)
    s.add("LpNormalization", s.positive(x) if s.chance(0.5) else x, axis=axis_of(s, x.rank), p=s.rng.choice((1, 2)))


@template(0.6)
def _lrn(s: Scope) -> None:
    x = s.pick(3, 4, filled=True)
    s.add("LRN", x, size=s.rng.choice((1, 2, 3)), alpha=s.rng.choice((0.1, None)), bias=s.rng.choice((None, 2.0)))


# Softmax and losses


@template(2)
def _softmax(s: Scope) -> None:
    x = s.pick(1, filled=True)
    s.add(s.rng.choice(("Softmax", "LogSoftmax")), x, axis=axis_of(s, x.rank))


@template()
def _loss(s: Scope) -> None:
    x = s.pick(2, 4, filled=True)
    labels = s.world.numbers.integers(0, x.shape[1], (x.shape[0], *x.shape[2:]))
    given: dict[str, Any] = {"reduction": s.rng.choice((None, "sum", "none", "mean"))}
    if s.chance(0.3):
        given["ignore_index"] = int(s.rng.choice((0, -1, x.shape[1] - 1)))
    if given.get("ignore_index") == -1 and labels.size:
        labels[tuple(0 for _ in labels.shape)] = -1
    weight = s.positive(s.like((x.shape[1],))) if s.chance(0.4) else None
    given_labels = s.leaf(labels.astype(s.rng.choice((np.int64, np.int32))))
    if s.chance(0.5):
        s.add_all("SoftmaxCrossEntropyLoss", x, given_labels, weight, outputs=s.rng.choice((1, 2)), **given)
    else:
        s.add("NegativeLogLikelihoodLoss", s.add("LogSoftmax", x, axis=1), given_labels, weight, **given)


# Recurrent


@template()
def _recurrent(s: Scope) -> None:
    op, gates = s.rng.choice((("RNN", 1), ("GRU", 3), ("LSTM", 4)))
    steps, batch, size, hidden = (s.rng.choice((1, 2, 3)) for _ in range(4))
    x = s.pick(3, 3, filled=True) if s.chance(0.4) else s.like((steps, batch, size))
    steps, batch, size = x.shape
    direction = s.rng.choice((None, "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    w, r = s.like((ways, gates * hidden, size)), s.like((ways, gates * hidden, hidden))
    b = s.like((ways, 2 * gates * hidden)) if s.chance(0.6) else None
    lengths = s.leaf(np.array([s.rng.randint(1, steps) for _ in range(batch)], np.int32)) if s.chance(0.3) else None
    h = s.like((ways, batch, hidden)) if s.chance(0.5) else None
    given: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    more: list[Any] = []
    if op == "LSTM":
        more = [
            s.like((ways, batch, hidden)) if s.chance(0.5) else None,
            s.like((ways, 3 * hidden)) if s.chance(0.3) else None,
        ]
        given["input_forget"] = s.rng.choice((None, None, 1))
    if op == "GRU":
        given["linear_before_reset"] = s.rng.choice((None, 1))
    if s.chance(0.2):
        given["activations"] = {
            "RNN": ["Sigmoid"],
            "GRU": ["Sigmoid", "Sigmoid"],
            "LSTM": ["Sigmoid", "Tanh", "Sigmoid"],
        }[op] * ways
    outputs = 3 if op == "LSTM" else 2
    named = [s.chance(0.7) for _ in range(outputs)]
    if not any(named):
        named[0] = True
    while not named[-1]:
        named.pop()
    s.add_all(op, s.calm(x), w, r, b, lengths, h, *more, outputs=len(named), named=named, **given)


# Attention


@template(1.2, 23)
def _attention(s: Scope) -> None:
    batch, heads, queries, keys, size = 1, s.rng.choice((1, 2)), s.rng.choice((1, 2, 3)), s.rng.choice((2, 3)), 2
    groups = heads if s.chance(0.7) else 1
    given: dict[str, Any] = {}
    if s.chance(0.5):
        q, k, v = (
            s.like((batch, heads, queries, size)),
            s.like((batch, groups, keys, size)),
            s.like((batch, groups, keys, size)),
        )
    else:
        given |= {"q_num_heads": heads, "kv_num_heads": groups}
        q, k, v = (s.like((batch, n, h * size)) for n, h in ((queries, heads), (keys, groups), (keys, groups)))
    mask = s.like((queries, keys)) if s.chance(0.4) else None
    s.add(
        "Attention",
        q,
        k,
        v,
        mask,
        is_causal=s.rng.choice((None, 1)),
        scale=s.rng.choice((None, 0.6)),
        softcap=s.rng.choice((None, None, 2.0)),
        **given,
    )


@template(0.6, 23)
def _rotary(s: Scope) -> None:
    x = s.like((1, 2, 3, 4))
    half = 2
    s.add("RotaryEmbedding", x, s.like((1, 3, half)), s.like((1, 3, half)), interleaved=s.rng.choice((None, 1)))


# Sequences and optionals


@template(1.2)
def _sequences(s: Scope) -> None:
    x = s.pick(1, 3, filled=True)
    axis = s.rng.randrange(x.rank)
    match s.rng.randrange(4):
        case 0:
            sequence = s.add("SequenceConstruct", x, *(s.like(x.shape) for _ in range(s.rng.randint(0, 2))))
        case 1:
            sequence = s.add("SplitToSequence", x, axis=axis, keepdims=s.rng.choice((None, 0)))
        case 2:
            size = x.shape[axis]
            cut = s.rng.randint(0, size)
            sequence = s.add("SplitToSequence", x, s.ints([cut, size - cut]), axis=axis)
        case _:
            sequence = s.add("SequenceEmpty", dtype=s.world.kind, kind=s.world.kind)
            sequence = s.add("SequenceInsert", sequence, x)
            sequence = s.add("SequenceInsert", sequence, s.like(x.shape), s.leaf(np.array(0)))
    if s.chance(0.3):
        sequence = s.add("SequenceInsert", sequence, s.like(np.shape(sequence.array[0])))
    if s.chance(0.2) and len(sequence.array) > 1:
        sequence = s.add("SequenceErase", sequence, s.leaf(np.array(s.rng.choice((0, -1)))) if s.chance(0.7) else None)
    if s.chance(0.5):
        s.add("SequenceAt", sequence, s.leaf(np.array(s.rng.randrange(-len(sequence.array), len(sequence.array)))))
    else:
        item = np.shape(sequence.array[0])
        s.add(
            "ConcatFromSequence",
            sequence,
            axis=s.rng.randrange(max(len(item), 1)) if item else 0,
            new_axis=1 if not item else s.rng.choice((None, 1)),
        )


@template(0.4, 15)
def _optionals(s: Scope) -> None:
    x = s.pick()
    s.add("OptionalGetElement", s.add("Optional", x, kind=OPTIONAL), kind=s.world.kind)


# Structures


def structure(function: Callable[[Scope], Any]) -> Callable[[Scope], Any]:
    """Mark a template whose nodes have graphs of their own."""
    function.structure = True  # type: ignore[attr-defined]
    return function


def _inner(s: Scope) -> Scope:
    return Scope(s.world, s)


def _few(s: Scope) -> int:
    return s.rng.choice((1, 1, 2, 3))


@template(2.5)
@structure
def _branches(s: Scope) -> None:
    hidden = s.rng.choice((0.0, 0.5, 1.0))
    then, other = _inner(s), _inner(s)
    then.grow(_few(s))
    count = s.rng.choice((1, 1, 2))
    results = []
    for _ in range(count):
        found = [v for v in then.values if v.is_float and v.kind == s.world.kind and v not in results]
        results.append(s.rng.choice(found) if found else then.add("Identity", s.pick()))
    results = [
        v if v in then.values and v.name not in {i.name for i in then.initializers} else then.add("Identity", v)
        for v in results
    ]
    other.grow(_few(s))
    others: list[Value] = []
    for value in results:
        like = other.shaped(value.shape)
        if like not in other.values or like in others or like.name in {i.name for i in other.initializers}:
            like = other.add("Identity", like)
        others.append(like)
    choice = s.rng.random() < 0.5
    graphs: dict[str, Any] = {
        "then_branch": then.graph(results, "then", hidden),
        "else_branch": other.graph(others, "else", hidden),
    }
    if not choice:
        graphs = {"then_branch": graphs["else_branch"], "else_branch": graphs["then_branch"]}
    if s.chance(0.4):
        test = s.add("Less", s.add("ReduceSum", s.pick(), keepdims=0), s.number(0.3), kind=BOOL)
    else:
        test = s.leaf(np.array(s.chance(0.5)))
    s.add_all("If", test, outputs=count, kind=s.world.kind, **graphs)


def _formal(scope: Scope, like: Any, kind: int, hidden: float) -> Value:
    value = Value(scope.world.fresh(), like, kind)
    scope.inputs.append(scope.info(value, hidden))
    scope.values.append(value)
    return value


def _settled(body: Scope, value: Value, shape: tuple[int, ...], taken: list[Value]) -> Value:
    """A value of the body, of a shape, that no other output is, and of no large size."""
    found = value if value.shape == shape else body.shaped(shape)
    if found.array.size and np.max(np.abs(found.real)) > 2:
        found = body.add("Tanh", found)
    names = _given(body)
    if found not in body.values or found in taken or found.name in names:
        found = body.add(s_choice(body, ("Identity", "Sin", "Tanh")), found)
    return found


def _given(body: Scope) -> set[str]:
    return {*(i.name for i in body.initializers), *(i.name for i in body.inputs)}


def s_choice(scope: Scope, names: tuple[str, ...]) -> str:
    """One of some names."""
    return scope.rng.choice(names)


def _result(body: Scope, taken: list[Value]) -> Value:
    """A float of the body for a scan output."""
    names = _given(body)
    found = [
        v for v in body.values if v.is_float and v.kind == body.world.kind and v not in taken and v.name not in names
    ]
    return body.rng.choice(found) if found else body.add("Identity", body.pick())


@template(2)
@structure
def _loop(s: Scope) -> None:
    hidden = s.rng.choice((0.0, 0.5, 1.0))
    states = [s.pick(0, 3) for _ in range(s.rng.choice((0, 1, 1, 2)))]
    body = _inner(s)
    step = _formal(body, np.array(0), INT64, 0.0)
    going = _formal(body, np.array(True), BOOL, 0.0)
    formals = [_formal(body, state.array, state.kind, hidden) for state in states]
    if s.chance(0.3):
        body.add("Mul", body.pick(), body.add("Cast", step, kind=s.world.kind, to=s.world.kind))
    body.grow(_few(s))
    taken: list[Value] = []
    for formal in formals:
        own = [
            v
            for v in body.values
            if v.is_float and v.shape == formal.shape and v.kind == formal.kind and v is not formal
        ]
        taken.append(_settled(body, own[-1] if own else formal, formal.shape, taken))
    scans: list[Value] = []
    for _ in range(s.rng.choice((0, 1, 2)) if states else s.rng.choice((1, 2))):
        scans.append(_result(body, [*taken, *scans]))
    match s.rng.randrange(3):
        case 0:
            again = body.add("Identity", going, kind=BOOL)
        case 1:
            again = body.add("Less", step, body.leaf(np.array(s.rng.choice((0, 1, 2)))), kind=BOOL)
        case _:
            again = body.add("Less", body.add("ReduceSum", body.pick(), keepdims=0), body.number(0.3), kind=BOOL)
    graph = body.graph([again, *taken, *scans], "loop", hidden)
    count = s.rng.choice((1, 2, 3)) if scans or s.chance(0.9) else 0
    most = s.leaf(np.array(count)) if s.chance(0.9) else None
    first = s.leaf(np.array(True)) if s.chance(0.5) else None
    total = len(taken) + len(scans)
    s.add_all("Loop", most, first, *states, outputs=total, kind=s.world.kind, body=graph)


@template(2)
@structure
def _scan(s: Scope) -> None:
    hidden = s.rng.choice((0.0, 0.5, 1.0))
    states = [s.pick(0, 3) for _ in range(s.rng.choice((0, 1, 1, 2)))]
    x = s.pick(1, 3, filled=True)
    axes = [s.rng.randrange(x.rank)]
    read = [x]
    if s.chance(0.4):
        found = s.floats(lambda v: x.shape[axes[0]] in v.shape)
        other = s.rng.choice(found) if found and s.chance(0.7) else s.uniform((x.shape[axes[0]], *s.world.sizes(1)))
        axes.append(s.rng.choice([k for k, d in enumerate(other.shape) if d == x.shape[axes[0]]]))
        read.append(other)
    back = [int(s.chance(0.3)) for _ in read]
    body = _inner(s)
    formals = [_formal(body, state.array, state.kind, hidden) for state in states]
    slices = [
        _formal(body, np.moveaxis(v.array, axis, 0)[:: -1 if b else 1][0], v.kind, hidden)
        for v, axis, b in zip(read, axes, back, strict=True)
    ]
    if states and s.chance(0.7):
        state = formals[0]
        piece = slices[0]
        body.add(s.rng.choice(("Add", "Mul")), state, body.add("ReduceSum", piece, keepdims=0))
    body.grow(_few(s))
    taken: list[Value] = []
    for formal in formals:
        own = [
            v
            for v in body.values
            if v.is_float and v.shape == formal.shape and v.kind == formal.kind and v is not formal
        ]
        taken.append(_settled(body, own[-1] if own else formal, formal.shape, taken))
    scans: list[Value] = []
    for _ in range(s.rng.choice((0, 1, 2)) if states else s.rng.choice((1, 2))):
        scans.append(_result(body, [*taken, *scans]))
    graph = body.graph([*taken, *scans], "scan", hidden)
    given: dict[str, Any] = {}
    if any(axes) or s.chance(0.3):
        given["scan_input_axes"] = [a - v.rank if s.chance(0.2) else a for a, v in zip(axes, read, strict=True)]
    if any(back) or s.chance(0.3):
        given["scan_input_directions"] = back
    if scans and s.chance(0.4):
        given["scan_output_axes"] = [s.rng.randint(0, v.rank) for v in scans]
    if scans and s.chance(0.4):
        given["scan_output_directions"] = [int(s.chance(0.5)) for _ in scans]
    total = len(taken) + len(scans)
    s.add_all("Scan", *states, *read, outputs=total, kind=s.world.kind, body=graph, num_scan_inputs=len(read), **given)


@template(2)
@structure
def _function(s: Scope) -> None:
    """A call of a local function: one that is there, or a new one."""
    if s.world.functions and s.chance(0.6):
        call(s, s.rng.choice(s.world.functions))
    else:
        call(s, define(s))


@template(0.6)
@structure
def _sequence_loop(s: Scope) -> None:
    """A Loop whose state is a sequence that grows."""
    x = s.pick(0, 3, filled=True)
    start = s.add("SequenceEmpty", dtype=s.world.kind, kind=s.world.kind)
    if s.chance(0.5):
        start = s.add("SequenceInsert", start, x)
    body = _inner(s)
    step = _formal(body, np.array(0), INT64, 0.0)
    going = _formal(body, np.array(True), BOOL, 0.0)
    name = s.world.fresh()
    held = helper.make_tensor_sequence_value_info(name, s.world.kind, None)
    body.inputs.append(held)
    state = Value(name, start.array, s.world.kind)
    body.values.append(state)
    body.grow(_few(s))
    item = body.shaped(x.shape)
    if body.chance(0.5):
        item = body.add("Mul", item, body.add("Cast", step, kind=s.world.kind, to=s.world.kind))
    grown = body.add("SequenceInsert", state, body.calm(item))
    again = body.add("Identity", going, kind=BOOL)
    results = [body.info(again), helper.make_tensor_sequence_value_info(grown.name, s.world.kind, None)]
    graph = helper.make_graph(body.nodes, "loop", body.inputs, results, body.initializers)
    made = s.add("Loop", s.leaf(np.array(s.rng.choice((1, 2, 3)))), None, start, kind=s.world.kind, body=graph)
    s.add("ConcatFromSequence", made, axis=0, new_axis=1)


@template(0.6, 17)
@structure
def _sequence_map(s: Scope) -> None:
    x = s.pick(1, 3, filled=True)
    sequence = s.add("SplitToSequence", x, axis=s.rng.randrange(x.rank))
    body = _inner(s)
    item = _formal(body, sequence.array[0], s.world.kind, 1.0)
    more, formal = [], []
    if s.chance(0.5):
        more = [s.like(np.shape(sequence.array[0]))]
        formal = [_formal(body, more[0].array, s.world.kind, 0.5)]
    body.add("Mul", item, formal[0] if formal else item)
    body.grow(_few(s))
    result = _result(body, [])
    made = s.add("SequenceMap", sequence, *more, kind=s.world.kind, body=body.graph([result], "map", 1.0))
    s.add("SequenceAt", made, s.leaf(np.array(s.rng.randrange(len(made.array)))))


@template(1.0)
@structure
def _run_time_branch(s: Scope) -> None:
    """Branches whose results have several shapes, and sizes that a branch chooses."""
    x = s.pick(1, 3, filled=True)
    size = x.shape[0]
    if s.chance(0.5):
        cut = [s.rng.randint(0, size) for _ in range(2)]
        branches = []
        for k in range(2):
            inner = _inner(s)
            sizes = inner.leaf(np.array([cut[k], size - cut[k]]), moves=False)
            branches.append(inner.graph([inner.add("Identity", sizes)], f"sizes{k}", s.rng.choice((0.0, 1.0))))
        chosen = s.add("If", s.leaf(np.array(s.chance(0.5))), then_branch=branches[0], else_branch=branches[1])
        s.add_all("Split", x, chosen, outputs=2, axis=0)
        return
    branches = []
    for k in range(2):
        inner = _inner(s)
        begin = inner.leaf(np.array([0]), moves=False)
        end = inner.leaf(np.array([s.rng.randint(1, size)]), moves=False)
        result = inner.add("Slice", inner.add(s.rng.choice(("Sin", "Neg", "Identity")), x), begin, end)
        branches.append(inner.graph([result], f"part{k}", s.rng.choice((0.0, 1.0))))
    s.add("If", s.leaf(np.array(s.chance(0.5))), kind=s.world.kind, then_branch=branches[0], else_branch=branches[1])


@template(0.5, 16)
def _grid_sample(s: Scope) -> None:
    x = s.like((1, s.rng.choice((1, 2)), 3, s.rng.choice((2, 4))))
    grid = s.leaf(s.world.numbers.uniform(-0.9, 0.9, (1, 2, 2, 2)).astype(np.float32), s.world.kind, moves=False)
    modes = ("linear", "nearest") if s.opset >= 20 else ("bilinear", "nearest")  # onnx.reference has cubic in float32
    s.add(
        "GridSample",
        x,
        grid,
        mode=s.rng.choice(modes),
        align_corners=s.rng.choice((0, 1)),
        padding_mode=s.rng.choice(("zeros", "border", "reflection")),
    )


@template(0.4, 20)
def _affine_grid(s: Scope) -> None:
    s.add("AffineGrid", s.like((2, 2, 3)), s.ints([2, 1, 2, 3]), align_corners=s.rng.choice((None, 1)))


@template(0.4, 18)
def _col2im(s: Scope) -> None:
    s.add("Col2Im", s.like((1, 4, 4)), s.ints([3, 3]), s.ints([2, 2]))


@template(0.5, 17)
def _fourier(s: Scope) -> None:
    x = s.like((1, s.rng.choice((3, 4)), 1))
    if s.opset >= 20:
        s.add("DFT", x, None, s.leaf(np.array(1)), onesided=s.rng.choice((None, 1)))
    else:
        s.add("DFT", x, axis=1, onesided=s.rng.choice((None, 1)))


@template(0.5, 16)
def _roi_align(s: Scope) -> None:
    x = s.like((1, 2, 4, 4))
    rois = s.leaf(np.array([[0.2, 0.3, 2.6, 3.1], [0.4, 0.1, 3.2, 2.7]], np.float32), s.world.kind, moves=False)
    s.add("RoiAlign", x, rois, s.leaf(np.array([0, 0])), output_height=2, output_width=2, sampling_ratio=2)


@template(0.4, 26)
def _cumulative_product(s: Scope) -> None:
    x = s.pick(1)
    s.add("CumProd", x, s.leaf(np.array(s.rng.randrange(x.rank))), exclusive=s.rng.choice((None, 1)))

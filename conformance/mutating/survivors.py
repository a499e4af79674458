"""The mutants that survive, and why. A row that no survivor needs fails the tests, as a survivor without a row does."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Equivalent:
    """Mutants that no case catches, and why. `operator`, `place` and `change` are patterns, as file names have them.

    `limit`: they are no equivalent ones, but beyond what the suite asks: another point, or a second derivative, would tell.
    """

    operator: str
    place: str
    change: str
    reason: str
    limit: bool = False

    def matches(self, operator: str, place: str, change: str) -> bool:
        """Whether it speaks of a mutant."""
        pairs = ((self.operator, operator), (self.place, place), (self.change, change))
        return all(fnmatchcase(text, _literal(pattern)) for pattern, text in pairs)


def _literal(pattern: str) -> str:
    """The pattern with nothing special but `*`: the places of emissions have brackets."""
    return pattern.replace("[", "[[]")


_KINK = "The two differ at a kink or a tie alone, where there is no derivative."
_GUARD = "A guard against 0/0, at points without a derivative."
_COMPARED = "The numbers are only compared with each other."
_SECOND = "It carries the value 0: derivatives of second order alone show it."
_FOLDED = "What lies inside is folded to where it is."
_BORDER = "It differs exactly at the border alone, where there is a kink."
_SUMMED = "What it sums has one element along each axis already, which no type says."
_RANKS = "The rule gives both the same rank before: the difference is 0."
_VECTOR = "The weights are a vector, a row of which has one element."
EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent("*", "rules/activation.*: op.Greater(*", "GreaterOrEqual", _KINK),
    Equivalent("*", "rules/activation.*: op.Less(*", "LessOrEqual", _KINK),
    Equivalent("*", "onnx/activation.*: op.Greater(*", "GreaterOrEqual", _KINK),
    Equivalent("GRU", "onnx/recurrent.Function.of: op.Less(*", "LessOrEqual", _KINK),
    Equivalent("Clip", "rules/arithmetic.clip: op.Less(*", "LessOrEqual", _KINK),
    Equivalent("Clip", "rules/arithmetic.clip: op.LessOrEqual(*", "Less", _KINK),
    Equivalent("Scatter*", "rules/indexing._scatter: op.Div(d_output, shares)", "only the first operand", _KINK),
    Equivalent("*LpPool", "rules/pooling._share: op.Where(*", "only the second branch", _GUARD, limit=True),
    Equivalent("*Loss", "onnx/loss.read_labels: op.Where(*", "only the second branch", _GUARD, limit=True),
    Equivalent("*", "onnx/indexing.positions: op.Range(*", "both +1", _COMPARED),
    Equivalent("*", "onnx/points._strides: op.Range(*", "both +1", _COMPARED),
    Equivalent(
        "*",
        "onnx/points._combined: op.Range(*",
        "both +1",
        "The pixels around a point are added up, in whatever order.",
    ),
    Equivalent("*", "onnx/normalization.statistics: op.Sub(*", "swapped operands", "The difference is squared."),
    Equivalent(
        "*",
        "onnx/arithmetic.broadcast_gradient: op.Squeeze(*",
        "next axis",
        "What is summed has size 1 along the next axis as well.",
    ),
    Equivalent(
        "Conv*",
        "onnx/convolution._product: op.Conv(*",
        "dilations +1",
        "The kernel has one element along that axis: there is nothing between.",
    ),
    Equivalent("*", "onnx/arithmetic._at_run_time: op.Sub(*", "swapped operands", _RANKS),
    Equivalent(
        "Tile",
        "onnx/shape.tile_grad_at_run_time: op.Range(*",
        "limit -1",
        "The step is 2 and the limit even: the last number is the same.",
    ),
    Equivalent("Scatter*", "rules/indexing._scatter: op.Where(op.Equal(count, 1)*", "*", _SECOND, limit=True),
    Equivalent(
        "Scatter*", "rules/indexing._scatter.<locals>.others: op.Sub(*", "swapped operands", _SECOND, limit=True
    ),
    Equivalent("ReduceProd", "rules/reduction.reduce_prod: op.Where(op.Equal(count, 1.0)*", "*", _SECOND, limit=True),
    Equivalent(
        "ReduceProd", "rules/reduction.reduce_prod.<locals>.others: op.Sub(*", "swapped operands", _SECOND, limit=True
    ),
    Equivalent(
        "BatchNormalization", "*", "transposed", "It is a vector, as only the run tells: the transpose is the same."
    ),
    Equivalent("M*", "rules/arithmetic._shared: op.Div(*", "only the first operand", _KINK),
    Equivalent("ReduceM*", "rules/reduction.reduce_max: op.Div(d_y, ties)", "only the first operand", _KINK),
    Equivalent("RoiAlign", "onnx/rois.make_samples: op.*", "*", _KINK),
    Equivalent("RoiAlign", "onnx/sampling.roi_align_grad: op.GreaterOrEqual(*", "Greater", _KINK),
    Equivalent("GridSample", "onnx/points._beyond: op.*", "*OrEqual", _KINK),
    Equivalent("GridSample", "onnx/points._reflect: op.*", "*OrEqual", _KINK),
    Equivalent("GridSample", "onnx/points._held: op.Greater(*", "GreaterOrEqual", _KINK),
    Equivalent("GridSample", "onnx/points._held: op.Less(*", "LessOrEqual", _KINK),
    Equivalent("LSTM", "onnx/recurrent.Function.of: op.Less(*", "LessOrEqual", _KINK),
    Equivalent("ReduceL2", "onnx/reduction.over_norm: op.Where(*", "only the second branch", _GUARD, limit=True),
    Equivalent(
        "Pow", "rules/arithmetic.pow_: op.Where(op.Equal(X, 0.0)*", "only the second branch", _GUARD, limit=True
    ),
    Equivalent(
        "ReduceLogSumExp",
        "rules/reduction.reduce_log_sum_exp: op.Where(*",
        "only the second branch",
        _GUARD,
        limit=True,
    ),
    Equivalent("LpNormalization", "rules/normalization.lp_normalization: op.Where(*", "*", _GUARD, limit=True),
    Equivalent("GridSample", "onnx/points.*: op.Where(*_beyond(*", "only the first branch", _FOLDED),
    Equivalent("GridSample", "onnx/points._reflect: op.Sub(x, low)", "swapped operands", "Its sign is dropped."),
    Equivalent("GridSample", "onnx/points._held: *And(*", "*", _BORDER),
    Equivalent("Resize", "rules/resize._ratio: *", "*", "The ratio is the same, if not in lowest terms."),
    Equivalent("Resize", "rules/resize._weights: op.Gather(*", "indices +1", "W is constant along that axis."),
    Equivalent("RotaryEmbedding", "onnx/arithmetic._at_run_time: op.*", "*", _SUMMED),
    Equivalent(
        "com.microsoft.FakeQuant",
        "input_tensor",
        "*",
        "The rule is the straight-through estimate, where differences see steps: no oracle can tell it.",
        limit=True,
    ),
    Equivalent("*Loss", "onnx/indexing._rows_added: *", "only the first operand", _VECTOR),
    Equivalent("*Loss", "onnx/indexing.part: op.Slice(*", "starts +1", _VECTOR),
    Equivalent(
        "Mod",
        "rules/arithmetic.mod: op.Where(*",
        "*",
        "It is for divisors that are infinite: special values.",
        limit=True,
    ),
    Equivalent(
        "Mod",
        "rules/arithmetic.mod: op.Add(quotient, 0.5)",
        "only the first operand",
        "It is for quotients that rounding left below a whole number: in float64 no case has one.",
        limit=True,
    ),
    Equivalent(
        "MeanVarianceNormalization",
        "rules/normalization.mean_variance_normalization: op.Add(deviation, *",
        "only the first operand",
        "1e-9 beside a deviation near 1 is less than what rounding explains.",
        limit=True,
    ),
    Equivalent("MeanVarianceNormalization", "rules/*: op.Where(*", "only the second branch", _GUARD, limit=True),
    Equivalent("MaxUnpool", "rules/pooling.max_unpool: op.Range(*", "both +1", _COMPARED),
    Equivalent(
        "MaxRoiPool", "onnx/rois.make_pixels: op.*", "dropped", "Indices are cut off, and counts compared with order."
    ),
    Equivalent(
        "MaxRoiPool",
        "onnx/points.read_largest_adjoint: op.Mul(*",
        "only the first operand",
        "The weight of a pixel is 1.",
    ),
    Equivalent("LinearAttention", "onnx/attention.Tokens._places: *", "both +1", _COMPARED),
    Equivalent("LinearAttention", "onnx/arithmetic.broadcast_gradient: op.ReduceSum(*", "*", _SUMMED),
    Equivalent("*", "onnx/points._combined: op.Unsqueeze(*", "next axis", "Only its diagonal is taken."),
    Equivalent("RNN", "*", "only the second operand", "The slope is that for a cotangent of 1."),
    Equivalent("SplitToSequence", "rules/sequence.split_to_sequence: op.Slice(*", "*", "No element of it is read."),
    Equivalent(
        "ConvTranspose",
        "rules/convolution._padded_at_run_time: op.Slice(whole, *",
        "next axis",
        "No window reaches what it cuts off.",
        limit=True,
    ),
)

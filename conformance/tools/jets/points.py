"""The special points of every operator with a rule, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Mapping

from refgrad.conformance.tools.jets.elementwise import ELEMENTWISE
from refgrad.conformance.tools.jets.tensors import TENSORS

POINTS = (*ELEMENTWISE, *TENSORS)


def _words(text: str) -> tuple[str, ...]:
    """The names in a line."""
    return tuple(text.split())


# Operators that move, copy, scale or add elements, or multiply inputs: they are polynomials of low degree everywhere. Their
# point is their first small case with every float 0.
AT_ZERO = _words(
    "AffineGrid Cast CastLike CausalConvWithState CenterCropPad Col2Im Compress Concat ConcatFromSequence DFT "
    "DepthToSpace DequantizeLinear Dropout Expand Flatten Gather GatherElements GatherND LinearAttention "
    "MaxUnpool OneHot Optional OptionalGetElement Pad Reshape ReverseSequence RotaryEmbedding STFT SequenceAt "
    "SequenceConstruct SequenceErase SequenceInsert Slice SpaceToDepth Split SplitToSequence Squeeze "
    "TensorScatter Tile Transpose Trilu Unsqueeze com.microsoft.ConcatTraining com.microsoft.DequantizeLinear "
    "com.microsoft.MatMulBnb4 com.microsoft.MatMulInteger16 com.microsoft.MatMulNBits com.microsoft.MulInteger "
    "com.microsoft.ReduceSumInteger com.microsoft.ShrunkenGather com.microsoft.TorchEmbedding "
    "com.microsoft.Trilu"
)

_WHOLE = "its result is whole numbers, so no derivative passes; a straight-through one is asked for by name"
_SHAPE = "the shape of its result changes beside the points that are special"

REASONS: Mapping[str, str] = {
    **dict.fromkeys(("QuantizeLinear", "com.microsoft.QuantizeLinear", "com.microsoft.FakeQuant"), _WHOLE),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "MatMulInteger", "ConvInteger"), _WHOLE),
    **dict.fromkeys(("Unique", "Range"), _SHAPE),
}

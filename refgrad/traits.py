"""Facts about the operators of ai.onnx that hold whatever their attributes are: each stands here once.

Whoever needs a list of operators takes a trait, and writes where it departs from it, with the reason. Every operator has one
kind, a group of `KINDS`; the other traits cut across the kinds.
"""

from __future__ import annotations


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Kinds: what an operator computes. First those that work element by element, broadcasting aside.
COMPARISONS = _named("Equal Greater GreaterOrEqual Less LessOrEqual")
LOGIC = _named("And Not Or Xor")
TESTS = _named("IsInf IsNaN")
BITWISE = _named("BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor")
CASTS = _named("Cast CastLike")
STEPS = _named("Ceil Floor Round Sign")  # constant between jumps
ARITHMETIC = _named("Abs Add Clip Div Max Mean Min Mod Mul Neg Sub Sum")
FUNCTIONS = _named("Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Log Pow Reciprocal Sin Sinh Sqrt Tan")
ACTIVATIONS = _named(
    "Celu Elu Gelu HardSigmoid HardSwish LeakyRelu Mish PRelu Relu Selu Shrink Sigmoid Softplus Softsign Swish Tanh "
    "ThresholdedRelu"
)
CHOICES = _named("Where")

# The elements of an input in another arrangement; some move each once, others some of them, repeat them or fill in.
RESHAPES = _named("Flatten Identity Reshape Squeeze Unsqueeze")  # in the same order
PERMUTATIONS = _named("DepthToSpace ReverseSequence SpaceToDepth Transpose")
SELECTIONS = _named(
    "CenterCropPad Compress Concat Expand Gather GatherElements GatherND Pad Slice Split Tile Trilu Unique"
)

SCATTERS = _named("Scatter ScatterElements ScatterND TensorScatter")
REDUCTIONS = _named(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)
CUMULATIONS = _named("CumProd CumSum")
PRODUCTS = _named("CausalConvWithState Conv ConvTranspose DeformConv Einsum Gemm MatMul")  # and sums of them
INTEGER_PRODUCTS = _named("ConvInteger MatMulInteger QLinearConv QLinearMatMul")
POOLS = _named("AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool LpPool MaxPool MaxRoiPool MaxUnpool RoiAlign")
RESAMPLING = _named("AffineGrid Col2Im GridSample Resize Upsample")
NORMALIZATIONS = _named(
    "BatchNormalization GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization "
    "MeanVarianceNormalization RMSNormalization"
)
SOFTMAXES = _named("Hardmax LogSoftmax Softmax")
ATTENTIONS = _named("Attention LinearAttention RotaryEmbedding SwiGLU")
LOSSES = _named("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
RECURRENT = _named("GRU LSTM RNN")
TRANSFORMS = _named("DFT Det STFT")
INDICES = _named("ArgMax ArgMin NonMaxSuppression NonZero OneHot TopK")
SIZES = _named("Shape Size")
QUANTIZERS = _named("BitCast DequantizeLinear DynamicQuantizeLinear QuantizeLinear")
RANDOM = _named("Bernoulli Dropout Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike")
CONSTANTS = _named("Constant ConstantOfShape EyeLike Range")
WINDOWS = _named("BlackmanWindow HammingWindow HannWindow MelWeightMatrix")  # tables of cosines and logarithms
CONTROL_FLOW = _named("If Loop Scan SequenceMap")
CONTAINERS = _named(
    "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt SequenceConstruct SequenceEmpty "
    "SequenceErase SequenceInsert SequenceLength SplitToSequence"
)
TEXT = _named("ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer")

KINDS = (
    COMPARISONS,
    LOGIC,
    TESTS,
    BITWISE,
    CASTS,
    STEPS,
    ARITHMETIC,
    FUNCTIONS,
    ACTIVATIONS,
    CHOICES,
    RESHAPES,
    PERMUTATIONS,
    SELECTIONS,
    SCATTERS,
    REDUCTIONS,
    CUMULATIONS,
    PRODUCTS,
    INTEGER_PRODUCTS,
    POOLS,
    RESAMPLING,
    NORMALIZATIONS,
    SOFTMAXES,
    ATTENTIONS,
    LOSSES,
    RECURRENT,
    TRANSFORMS,
    INDICES,
    SIZES,
    QUANTIZERS,
    RANDOM,
    CONSTANTS,
    WINDOWS,
    CONTROL_FLOW,
    CONTAINERS,
    TEXT,
)

# Traits that cut across the kinds.
ELEMENTWISE = (  # an element of the result depends on the elements at the same place alone
    COMPARISONS
    | LOGIC
    | TESTS
    | BITWISE
    | CASTS
    | STEPS
    | ARITHMETIC
    | FUNCTIONS
    | ACTIVATIONS
    | CHOICES
    | {"Identity"}
)
MIXING = (  # an element of the result depends on several elements, or on how many there are
    REDUCTIONS | CUMULATIONS | PRODUCTS | NORMALIZATIONS | SOFTMAXES | INDICES | {"Size"}
)
MOVING = RESHAPES | PERMUTATIONS | SELECTIONS  # each element of the result is one of an input, or a fill
SUMS = _named("Add Mean Sub Sum")  # of the same elements of several inputs
BOOLEAN = COMPARISONS | LOGIC | TESTS | {"OptionalHasElement"}  # the result is bool
COUNTING = SIZES | {"ArgMax", "ArgMin", "NonZero", "SequenceLength"}  # the result is int64: a size or places
SEQUENCES = _named(
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceMap SplitToSequence"
)  # results
OF_SIZES = SIZES | {"EyeLike", "RandomNormalLike", "RandomUniformLike", "SequenceLength"}  # they read no element

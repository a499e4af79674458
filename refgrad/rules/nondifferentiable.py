"""Operators without a rule, each with the reason: zero, no derivative, through the function body, or not yet written."""

from __future__ import annotations

from refgrad.protos.domains import ML, NCHWC
from refgrad.tables.registry import BODY, NO_DERIVATIVE, ZERO

_PIECEWISE = "piecewise constant: zero wherever it has a derivative"
_SHAPE = "depends on the shape of its input, not on its values"
_INTEGER = "its values are integers"
_WINDOW = "its input is a number of samples"
_RANDOM = "random numbers depend on the shape and the seed, not on the values"

for _name, _reason in {
    "Ceil": _PIECEWISE,
    "Floor": _PIECEWISE,
    "Round": _PIECEWISE,
    "Sign": _PIECEWISE,
    "Hardmax": _PIECEWISE,
    "BitShift": _INTEGER,
    "BitwiseAnd": _INTEGER,
    "BitwiseNot": _INTEGER,
    "BitwiseOr": _INTEGER,
    "BitwiseXor": _INTEGER,
    "ConstantOfShape": "its input is a shape",
    "Constant": "it has no input",
    "EyeLike": _SHAPE,
    "RandomNormalLike": _RANDOM,
    "RandomUniformLike": _RANDOM,
    "Bernoulli": "a random truth value is 0 or 1: piecewise constant in its probability",
    "RandomNormal": "it has no input",
    "RandomUniform": "it has no input",
    "Multinomial": "the result is a random index",
    "Shape": _SHAPE,
    "Size": _SHAPE,
    "BlackmanWindow": _WINDOW,
    "HammingWindow": _WINDOW,
    "HannWindow": _WINDOW,
    "MelWeightMatrix": "its inputs are numbers of bins and frequencies that are rounded to bins",
    "SequenceEmpty": "it has no input",
    "SequenceLength": "the result is a number of elements",
    "OptionalHasElement": "the result is a truth value",
    "ArgMax": "the result is an index",
    "ArgMin": "the result is an index",
    "NonZero": "the results are indices",
    "NonMaxSuppression": "the results are indices",
    "RegexFullMatch": "the result is a truth value",
    "IsNaN": "the result is a truth value",
    "IsInf": "the result is a truth value",
    "Equal": "the result is a truth value",
    "Greater": "the result is a truth value",
    "GreaterOrEqual": "the result is a truth value",
    "Less": "the result is a truth value",
    "LessOrEqual": "the result is a truth value",
    "Not": "the result is a truth value",
    "And": "the result is a truth value",
    "Or": "the result is a truth value",
    "Xor": "the result is a truth value",
}.items():
    ZERO["", _name] = _reason

for _name, _reason in {
    "ImageDecoder": "its input is an encoded stream of bytes",
    "StringConcat": "its values are strings",
    "StringNormalizer": "its values are strings",
    "StringSplit": "its values are strings",
    "BitCast": "it reads the bits of its input as another type",
    "TfIdfVectorizer": "it counts integers or strings",
}.items():
    NO_DERIVATIVE["", _name] = _reason

for _name, _reason in {
    "Binarizer": _PIECEWISE,
    "TreeEnsemble": _PIECEWISE,
    "TreeEnsembleClassifier": _PIECEWISE,
    "TreeEnsembleRegressor": _PIECEWISE,
    "CategoryMapper": "it maps strings to integers and back",
    "LabelEncoder": "it looks its input up in a table of keys",
    "OneHotEncoder": "it compares its input with categories",
}.items():
    ZERO[ML, _name] = _reason

# Differentiated through the function body of the schema; what it computes, in a line.
for _name, _meaning in {
    "DynamicQuantizeLinear": "QuantizeLinear with the scale and the zero point of the range of x",
}.items():
    BODY["", _name] = _meaning
# Deprecated: the opsets that have them are converted to newer ones before anything else happens.
BODY["", "Scatter"] = "ScatterElements, which replaced it"
BODY["", "Upsample"] = "Resize with asymmetric coordinates, which replaced it"
BODY["ai.onnx.preview", "FlexAttention"] = "prob_mod(softmax(score_mod(σ·Q·Kᵀ)))·V"

# A model in the layout of a processor is read back into plain operators before anything else happens.
for _name, _meaning in {
    "Conv": "Conv, or as FusedConv where it adds or activates",
    "MaxPool": "MaxPool",
    "AveragePool": "AveragePool",
    "GlobalMaxPool": "GlobalMaxPool",
    "GlobalAveragePool": "GlobalAveragePool",
    "Upsample": "Resize",
    "ReorderInput": "Identity, or as Transpose where channels are last",
    "ReorderOutput": "Identity, or as Transpose where channels are last",
}.items():
    BODY[NCHWC, _name] = f"read back as {_meaning}"

for _name in (
    *("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool"),
    *("GlobalLpPool", "GlobalMaxPool", "GridSample", "InstanceNormalization", "LRN", "LpPool", "MaxPool", "MaxUnpool"),
    *("QLinearAveragePool", "QLinearConv", "QLinearConvTranspose", "Resize", "SpaceToDepth"),
):
    NO_DERIVATIVE["com.ms.internal.nhwc", _name] = (
        "it stands only in models that ONNX Runtime optimized for a device which wants the channels last: save the model with "
        "the provider of the CPU, which does not"
    )

"""Operators without a rule, each with the reason: the derivative is zero, or there is none."""

from __future__ import annotations

from refgrad.registry import NO_DERIVATIVE, ZERO

_PIECEWISE = "piecewise constant: zero wherever it has a derivative"
_SHAPE = "depends on the shape of its input, not on its values"
_RANDOM = "random numbers depend on the shape and the seed, not on the values"

for _name, _reason in {
    "Ceil": _PIECEWISE,
    "Floor": _PIECEWISE,
    "Round": _PIECEWISE,
    "Sign": _PIECEWISE,
    "Hardmax": _PIECEWISE,
    "ConstantOfShape": "its input is a shape",
    "Constant": "it has no input",
    "EyeLike": _SHAPE,
    "RandomNormalLike": _RANDOM,
    "RandomUniformLike": _RANDOM,
    "Bernoulli": _RANDOM,
    "Shape": _SHAPE,
    "Size": _SHAPE,
    "ArgMax": "an index",
    "ArgMin": "an index",
    "NonZero": "indices",
    "IsNaN": "a truth value",
    "IsInf": "a truth value",
    "Equal": "a truth value",
    "Greater": "a truth value",
    "GreaterOrEqual": "a truth value",
    "Less": "a truth value",
    "LessOrEqual": "a truth value",
    "Not": "a truth value",
    "And": "a truth value",
    "Or": "a truth value",
    "Xor": "a truth value",
}.items():
    ZERO["", _name] = _reason

for _name, _reason in {
    "ImageDecoder": "its input is an encoded stream of bytes",
    "StringNormalizer": "its values are strings",
    "TfIdfVectorizer": "it counts integers or strings",
}.items():
    NO_DERIVATIVE["", _name] = _reason

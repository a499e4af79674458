"""Operators of ONNX Runtime without a rule and without a body, each with the reason: zero, or no derivative."""

from __future__ import annotations

from refgrad.extend import no_derivative, zero
from refgrad.protos.domains import MICROSOFT

_INTEGER = "its values are integers"

for _name, _reason in {
    "BifurcationDetector": _INTEGER,
    "DynamicTimeWarping": "indices: the points of the cheapest path",
    "GatherPacked": "its inputs are packed bytes and indices",
    "GreedySearch": "it returns tokens, which are indices",
    "IsAllFinite": "the result is a truth value",
    "MurmurHash3": "a hash",
    "NGramHashMapping": _INTEGER,
    "PackedSparseAttentionIndexerMerge": "indices",
    "SpeculativePrefixCommit": "numbers of tokens",
    "VarlenNGramHashMapping": _INTEGER,
}.items():
    zero(_name, _reason, domain=MICROSOFT)

_COMPILED = "what it computes is in the compiled code of a device"
_SEARCHED = "it runs a decoder until it has found its tokens: differentiate the model of the decoder"

for _name, _reason in {
    "BeamSearch": _SEARCHED,
    "DequantizeBFP": "it reads the bytes of numbers in block floating point",
    "EPContext": _COMPILED,
    "MatMulPacked": "its bytes are in formats that its schema does not define: store the weights for MatMulNBits",
    "MoEPacked": "its weights are blobs in formats that its schema does not define: unpack them and use MoE",
    "QuantizeBFP": "it rounds to numbers in block floating point, in whose bytes no derivative is written",
    "Sampling": "it runs a decoder on the tokens that it draws: differentiate the model of the decoder",
    "Snpe": _COMPILED,
    "SparseToDenseMatMul": "it reads a sparse tensor: store the matrix as a dense one, and use FusedMatMul",
    "Tokenizer": "its values are strings",
    "WhisperBeamSearch": _SEARCHED,
}.items():
    no_derivative(_name, _reason, domain=MICROSOFT)

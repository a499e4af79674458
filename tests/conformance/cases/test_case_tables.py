"""The tables of cases: what they have of every operator, what is right at special numbers, and the rare forms themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from checking import assert_gradient
from onnx import NodeProto, helper, numpy_helper
from onnx.defs import OpSchema

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, qualified
from refgrad.conformance.cases import kinks, rare, special
from refgrad.conformance.cases.special import Special
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.tools.coverage import read_reasons
from refgrad.derivatives import ortbuilder
from refgrad.protos.traverse import attribute_value, versions_of
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.kinks import KINKS
from refgrad.tables.registry import BODY, CONTROL_FLOW_RULES, RULES
from refgrad.tables.schemas import find_schema

pytestmark = pytest.mark.interpreter

FLOATS = {"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"}

# What an operator has no case of, and why.
_SHARED = "a cache that several calls share: refused"
_CHOSEN_ELSEWHERE = "refused: a selection that is shared"
_NOT_COMPUTED = "refused: ONNX Runtime does not compute with it"
_FLOAT_8 = "refused: weights that are floats of 4 and 8 bits"
_ROTARY = "refused: the kernel ignores it"
_BODY = "its body reshapes to −1 elements, which are no number where there are none"
_ONE_VALUE = "ONNX Runtime knows no other value"
_PADDED = "refused: it does not say how it pads the axes before the last"
NO_CASES = read_reasons()["cases"]
NOT_SET = {
    ("Optional", "type"): "of an empty optional",
    ("ai.onnx.ml.Imputer", "replaced_value_int64"): "for integers",
    ("ai.onnx.ml.Imputer", "imputed_value_int64s"): "for integers",
    ("ai.onnx.ml.SVMClassifier", "prob_a"): "refused: probabilities of an iteration",
    ("ai.onnx.ml.SVMClassifier", "prob_b"): "refused: probabilities of an iteration",
    ("com.microsoft.GatherBlockQuantized", "gather_axis"): "of data in types that opset 17 does not cast",
    ("com.microsoft.MatMulNBits", "weight_prepacked"): "refused: a layout of CUDA kernels",
    ("com.microsoft.DynamicSparseAttention", "is_causal"): "it must be 1",
    ("com.microsoft.DynamicSparseAttention", "output_bf16"): "a result of 8 bits, of which no difference settles",
    ("com.microsoft.SparsePagedAttention", "auxiliary_cache_layout"): "there is one",
    ("com.microsoft.PackedSparseAttentionIndexer", "max_output_entries"): _CHOSEN_ELSEWHERE,
    ("com.microsoft.QOrderedAttention", "qkv_hidden_sizes"): _NOT_COMPUTED,
    ("com.microsoft.QAttention", "past_present_share_buffer"): _SHARED,
    ("com.microsoft.QAttention", "do_rotary"): _ROTARY,
    ("com.microsoft.QMoE", "quant_type"): _FLOAT_8,
    ("com.microsoft.RouterGateUpProj", "activation"): "there is one",
    ("com.microsoft.CausalConvWithState", "ndim"): _PADDED,
    ("com.microsoft.Irfft", "normalized"): _ONE_VALUE,
    ("com.microsoft.Irfft", "onesided"): _ONE_VALUE,
    ("com.microsoft.Rfft", "normalized"): _ONE_VALUE,
    ("com.microsoft.Rfft", "onesided"): _ONE_VALUE,
    ("com.microsoft.Rfft", "signal_ndim"): _ONE_VALUE,
    ("com.microsoft.SkipGroupNorm", "channels_last"): "refused: ONNX Runtime adds the skip to the last axis alone",
}
NOT_GIVEN = {
    **dict.fromkeys(
        (
            ("com.microsoft.PackedSparseAttentionIndexer", name)
            for name in ("indexshare_mode", "merged_indices", "merged_counts", "merged_status")
        ),
        _CHOSEN_ELSEWHERE,
    ),
    ("com.microsoft.QOrderedAttention", "past"): _NOT_COMPUTED,
    ("com.microsoft.QOrderedAttention", "attention_bias"): _NOT_COMPUTED,
    **dict.fromkeys((("com.microsoft.GemmFloat8", f"scale{x}") for x in "ABY"), "refused: of floats of 8 bits"),
    ("com.microsoft.NhwcMaxPool", "x"): "integers that another node of the case makes",
    ("com.microsoft.QMoE", "fc1_global_scale"): _FLOAT_8,
    ("com.microsoft.QMoE", "fc2_global_scale"): _FLOAT_8,
    ("com.microsoft.QMoE", "fc1_act_scale"): _FLOAT_8,
    ("com.microsoft.QMoE", "fc2_act_scale"): _FLOAT_8,
    ("com.microsoft.QMoE", "fc1_act_block_scale"): _FLOAT_8,
    ("com.microsoft.QMoE", "fc2_act_block_scale"): _FLOAT_8,
}
_ENDS = "without it ONNX Runtime ends the process: tests/microsoft/test_microsoft_qlinear.py leaves it out"
NOT_LEFT_OUT = {
    ("com.microsoft.QLinearSigmoid", "Y_zero_point"): _ENDS,
    ("com.microsoft.QLinearLeakyRelu", "Y_zero_point"): _ENDS,
    **{("com.microsoft.AttnLSTM", name): "refused: there is nothing to attend to" for name in ("QW", "MW", "V", "M")},
    ("com.microsoft.QMoE", "fc1_scales"): _FLOAT_8,
    ("com.microsoft.QMoE", "fc2_scales"): _FLOAT_8,
}
# What reads a sequence or integers that other nodes of the case make: a case feeds tensors, of floats.
READS_SEQUENCES = ("ConcatFromSequence", "SequenceAt", "SequenceErase", "SequenceInsert", "SequenceMap")
READS_INTEGERS = ("com.microsoft.NhwcMaxPool",)
NOT_EMPTY = {
    "If": "its input is a condition",
    "Range": "its inputs are scalars",
    "com.microsoft.AttnLSTM": "ONNX Runtime ends its process where there is no sequence",
    "com.microsoft.BatchNormInternal": "it divides by the number of elements",
    "com.microsoft.ConvTransposeWithDynamicPads": "ONNX Runtime computes it of no images, and not its gradient's Conv",
    "com.microsoft.GatedDeltaNet": "it has a token",
    "com.microsoft.GatedDeltaNetStateReplay": "its sizes are positive",
    "com.microsoft.GroupNorm": _BODY,
    "com.microsoft.Mamba2Verify": "it has a token",
    "com.microsoft.Range": "its inputs are scalars",
    "com.microsoft.SkipGroupNorm": _BODY,
}
# Which input is broadcast along axes that it has as 1 (True), or that it has not (False), where not both are.
ONE_WAY: dict[str, dict[str, set[bool]]] = {
    "Clip": {"input": set(), "min": {False}, "max": {False}},  # scalars
    "PRelu": {"X": set()},  # the slope alone
}
# The smallest rank of the first input; 0 where nothing is said.
RANKS = {
    1: """CumProd CumSum Compress Concat CenterCropPad Gather GatherElements GatherND OneHot Slice LayerNormalization
    LogSoftmax LpNormalization MatMul RMSNormalization Resize Scatter MeanVarianceNormalization ScatterElements
    ScatterND Softmax Split Squeeze TopK SplitToSequence ai.onnx.ml.ArrayFeatureExtractor ai.onnx.ml.Imputer
    ai.onnx.ml.Normalizer ai.onnx.ml.Scaler com.microsoft.BiasDropout com.microsoft.BiasGelu
    com.microsoft.BitmaskBiasDropout com.microsoft.BranchwiseRMSNorm com.microsoft.ConcatTraining
    com.microsoft.DynamicQuantizeMatMul com.microsoft.FusedMatMul com.microsoft.FusedMatMulActivation
    com.microsoft.GatedAdd com.microsoft.GatedRMSNorm com.microsoft.GatherND com.microsoft.HyperConnectionLowRankMix
    com.microsoft.HyperConnectionPostMix com.microsoft.HyperConnectionPreMix
    com.microsoft.MatMulBlockQuantizedFp4Weight com.microsoft.MatMulBlockQuantizedFp8Weight com.microsoft.MatMulBnb4
    com.microsoft.MatMulFpQ4 com.microsoft.MatMulInteger16 com.microsoft.MatMulIntegerToFloat
    com.microsoft.MatMulNBits com.microsoft.MatMulNBitsMlp com.microsoft.MatMulNBitsQLoRA com.microsoft.MatMulNBitsQkv
    com.microsoft.PadAndUnflatten com.microsoft.QLinearReduceMean com.microsoft.QLinearSoftmax
    com.microsoft.QOrderedLayerNormalization com.microsoft.ReduceSumInteger com.microsoft.RouterGateUpProj
    com.microsoft.ShrunkenGather com.microsoft.SimplifiedLayerNormalization com.microsoft.SoftmaxCrossEntropy
    com.microsoft.SparseSoftmaxCrossEntropy com.microsoft.SwiGLU com.microsoft.Unique""",
    2: """BatchNormalization DFT Det Gemm GroupNormalization LRN NegativeLogLikelihoodLoss ReverseSequence
    SoftmaxCrossEntropyLoss TensorScatter Trilu ai.onnx.ml.FeatureVectorizer ai.onnx.ml.LinearClassifier
    ai.onnx.ml.LinearRegressor ai.onnx.ml.SVMClassifier ai.onnx.ml.SVMRegressor com.microsoft.EmbedLayerNormalization
    com.microsoft.FlattenAndUnpad com.microsoft.FusedGemm com.microsoft.GatherBlockQuantized
    com.microsoft.GemmFastGelu com.microsoft.GemmFloat8 com.microsoft.MoE com.microsoft.MoEGroupRouter
    com.microsoft.NGramRepeatBlock com.microsoft.PagedAttention com.microsoft.QEmbedLayerNormalization
    com.microsoft.QGemm com.microsoft.QMoE com.microsoft.QOrderedMatMul com.microsoft.SoftmaxCrossEntropyLossInternal
    com.microsoft.SparsePagedAttention com.microsoft.TransposeMatMul com.microsoft.Trilu
    com.microsoft.RelativePositionBias com.microsoft.GatedRelativePositionBias com.microsoft.RestorePadding
    com.microsoft.PackedAttention com.microsoft.PackedMultiHeadAttention""",
    3: """AffineGrid Attention AveragePool CausalConvWithState Col2Im Conv ConvTranspose DeformConv GRU
    GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample InstanceNormalization LSTM LinearAttention LpPool MaxPool
    MaxUnpool RNN RotaryEmbedding STFT com.microsoft.Attention com.microsoft.BatchNormInternal com.microsoft.BiasAdd
    com.microsoft.BiasSoftmax com.microsoft.BiasSplitGelu com.microsoft.ConvTransposeWithDynamicPads
    com.microsoft.DynamicSparseAttention com.microsoft.GroupQueryAttention com.microsoft.MaxpoolWithMask
    com.microsoft.MultiHeadAttention com.microsoft.NhwcConv com.microsoft.NhwcFusedConv com.microsoft.QAttention
    com.microsoft.QLinearAveragePool com.microsoft.QLinearConv com.microsoft.QLinearGlobalAveragePool
    com.microsoft.QOrderedAttention com.microsoft.SkipLayerNormalization
    com.microsoft.SkipSimplifiedLayerNormalization com.microsoft.SparseAttention
    com.microsoft.RotaryEmbedding com.microsoft.MRotaryEmbedding com.microsoft.GemmaRotaryEmbedding
    com.microsoft.DecoderMaskedMultiHeadAttention com.microsoft.DecoderMaskedSelfAttention com.microsoft.DecoderAttention
    com.microsoft.LongformerAttention com.microsoft.RemovePadding""",
    4: """com.microsoft.RMSNormRotary DepthToSpace MaxRoiPool RoiAlign SpaceToDepth Upsample ai.onnx.preview.FlexAttention
    com.microsoft.EngramGate com.microsoft.FusedConv com.microsoft.GroupNorm com.microsoft.SkipGroupNorm""",
}
RANKS[1] += """ com.microsoft.ComplexMul com.microsoft.ComplexMulConj com.microsoft.ConvStateReplay
    com.microsoft.GatedDeltaNetStateReplay com.microsoft.Rfft com.microsoft.UnfoldTensor"""
RANKS[2] += """ com.microsoft.CDist com.microsoft.GatedDeltaNet com.microsoft.Inverse com.microsoft.Irfft
    com.microsoft.Mamba2Verify com.microsoft.TorchEmbedding com.microsoft.VarlenCausalConvWithState
    com.microsoft.WordConvEmbedding"""
RANKS[3] += """ com.microsoft.AttnLSTM com.microsoft.CausalConvWithState com.microsoft.LinearAttention
    com.microsoft.LinearAttentionGate"""
RANKS[4] += " com.microsoft.CropAndResize com.microsoft.GridSample"
RANKS[3] += " com.microsoft.DynamicQuantizeLSTM com.microsoft.QOrderedLongformerAttention"
RANKS[3] += " com.microsoft.SparseAttentionIndexer"
RANKS[2] += " com.microsoft.PackedSparseAttentionIndexer"
SMALLEST = {name: rank for rank, names in RANKS.items() for name in names.split()}


# What the tables have


@dataclass(frozen=True)
class Form:
    """The node of a case: what it is given by the names of the schema, and whether that is fed or constant."""

    node: NodeProto
    given: dict[str, list[tuple[np.ndarray, bool]]]

    @classmethod
    def of(cls, case: Case) -> Form:
        node = case.node
        schema = find_schema(node.op_type, node.domain, versions_of(case.model).get(node.domain, 1))
        constants = {t.name: numpy_helper.to_array(t) for t in case.model.graph.initializer}
        given: defaultdict[str, list[tuple[np.ndarray, bool]]] = defaultdict(list)
        for k, name in enumerate(node.input):
            source = name if name in constants or name in case.feeds else name.removesuffix("_")  # behind a Reshape
            if source in constants or source in case.feeds:
                formal = schema.inputs[min(k, len(schema.inputs) - 1)].name
                given[formal].append((constants.get(source, case.feeds.get(source)), source in constants))
        return cls(node, dict(given))


def forms_of(operator: str) -> list[Form]:
    """The smooth cases of an operator."""
    return [Form.of(case) for case in tables([operator]) if case.operator == operator and case.values == "smooth"]


OPERATORS = sorted({*RULES, *CONTROL_FLOW_RULES, *BODY})
NAMES = {key: qualified(helper.make_node(key[1], [], [], domain=key[0])) for key in OPERATORS}
COVERED = [key for key in OPERATORS if NAMES[key] not in NO_CASES]


def test_every_operator_with_a_derivative_has_cases() -> None:
    have = {case.operator for case in tables() if case.values == "smooth"}
    assert {NAMES[key] for key in OPERATORS} - have == NO_CASES.keys()


def test_no_reason_is_left_over() -> None:
    names = set(NAMES.values())
    assert {name for name, _ in (*NOT_SET, *NOT_GIVEN, *NOT_LEFT_OUT)} | NOT_EMPTY.keys() | SMALLEST.keys() <= names


@pytest.mark.parametrize("key", COVERED, ids="-".join)
def test_the_cases_have_every_form_of_an_operator(key: tuple[str, str]) -> None:
    name, schema, forms = NAMES[key], find_schema(key[1], key[0]), forms_of(NAMES[key])
    wrong = [*attributes_without_another_value(name, schema, forms), *optional_inputs(name, schema, forms)]
    wrong += fed_or_constant_alone(name, schema, forms)
    if name not in READS_SEQUENCES + READS_INTEGERS:
        wrong += sizes_and_ranks(name, schema, forms)
    if key in RULES and RULES[key].broadcast:
        wrong += not_broadcast(name, RULES[key].wrt, forms)
    assert wrong == []


def attributes_without_another_value(name: str, schema: OpSchema, forms: list[Form]) -> Iterator[str]:
    """Each attribute is set to another value than its default."""
    for attribute, declared in schema.attributes.items():
        usual = attribute_value(declared.default_value) if declared.default_value.name else None
        given = [attribute_value(a) for form in forms for a in form.node.attribute if a.name == attribute]
        if (all(value == usual for value in given)) != ((name, attribute) in NOT_SET):
            yield f"the attribute {attribute} is set to {given or 'nothing'}"


def optional_inputs(name: str, schema: OpSchema, forms: list[Form]) -> Iterator[str]:
    """Each optional input is given and left out."""
    for formal in schema.inputs:
        if formal.option == OpSchema.FormalParameterOption.Optional:
            kinds = {formal.name in form.given for form in forms}
            expected = {False, True}
            expected -= {True} if (name, formal.name) in NOT_GIVEN else set()
            expected -= {False} if (name, formal.name) in NOT_LEFT_OUT else set()
            if kinds != expected:
                yield f"the input {formal.name} is given: {kinds} instead of {expected}"


def fed_or_constant_alone(name: str, schema: OpSchema, forms: list[Form]) -> Iterator[str]:
    """Each input that is no float is fed and constant."""
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    for formal in schema.inputs:
        types = constraints.get(formal.type_str, {formal.type_str})
        tensors = {kind for kind in types if kind.startswith("tensor(")}
        if tensors and not tensors & FLOATS and (name, formal.name) not in NOT_GIVEN:
            kinds = {constant for form in forms for _, constant in form.given.get(formal.name, [])}
            if kinds != {False, True}:
                yield f"the input {formal.name} is constant: {kinds}"


def sizes_and_ranks(name: str, schema: OpSchema, forms: list[Form]) -> Iterator[str]:
    """There is a case of no elements, and one of the smallest rank."""
    sizes = {array.size for form in forms for each in form.given.values() for array, _ in each}
    if (0 in sizes) == (name in NOT_EMPTY):
        yield f"an empty tensor: {0 in sizes}"
    first = schema.inputs[0].name
    smallest = min(form.given[first][0][0].ndim for form in forms if first in form.given)
    if smallest != SMALLEST.get(name, 0):
        yield f"the smallest rank is {smallest} instead of {SMALLEST.get(name, 0)}"


def not_broadcast(name: str, wrt: Iterable[str], forms: list[Form]) -> Iterator[str]:
    """Each float input is smaller than another one of its case, once of the same rank and once of a smaller one."""
    found: defaultdict[str, set[bool]] = defaultdict(set)
    for form in forms:
        shapes = {f"{name} {k}": a.shape for name, each in form.given.items() for k, (a, _) in enumerate(each)}
        for each, shape in shapes.items():
            for other in shapes.values():
                if len(shape) <= len(other) and np.broadcast_shapes(shape, other) != shape:
                    found[each.split()[0]].add(len(shape) == len(other))
    ways = {each: {False, True} for each in wrt} | ONE_WAY.get(name, {})
    for each, expected in ways.items():
        if found[each] != expected:
            yield f"the input {each} is broadcast along axes of size 1: {found[each]} instead of {expected}"


# Kinks and special numbers


def test_every_kink_has_a_case_and_what_is_beside_it() -> None:
    every = list(kinks.cases())
    at = [case for case in every if case.values == "kink"]
    assert [case.operator for case in at] == [kink.operator for kink in KINKS]
    for kink, case in zip(KINKS, at, strict=True):
        stem = case.name.split("-", 2)[2]
        sides = {other.name.split("-")[1] for other in every if other.name.split("-", 2)[2] == stem}
        assert len(sides) > 1 or (kink.operator, kink.where) in kinks.ONLY_AT


@pytest.mark.parametrize("case", [case for case in kinks.cases() if case.values == "smooth"], ids=str)
def test_beside_a_kink_there_is_a_derivative(case: Case) -> None:
    for dialect in DIALECTS:
        assert_gradient(case, dialect)


# In float32 the result that the gradient is computed from is no number that it could be computed from.
IN_FLOAT32 = {
    "ReduceL2-overflow": "the norm overflows, as the sum of squares in it does",
    "ReduceL2-underflow": "the norm is 0, as the sum of squares in it is",
    "ReduceLogSumExp-underflow": "log 2 is lost beside 1e30",
    "ReduceLogSumExp-overflow": "exp(x − y) has the absolute error of y, 1000·2⁻²⁴",
}
IN_FLOAT64 = ("ReduceLogSumExp-underflow",)
# Where kernels of ONNX Runtime 1.19.2's training build are wrong, or flush what is subnormal to 0.
OF_RUNTIME = {
    ("ort", "Gelu-far-out"): "x·φ(x) does not go to 0 for x → −∞",
    ("ort", "Gelu-far-out-tanh"): "x³ overflows: NaN",
    ("ort", "FastGelu-far-out"): "x³ overflows: NaN",
    ("ort", "Div-overflow"): "B² overflows: 0",
    ("ort", "Div-underflow"): "B² underflows: infinite",
    ("onnx", "Sqrt-next-to-zero"): "subnormal numbers are 0",
    ("ort", "Sqrt-next-to-zero"): "subnormal numbers are 0",
}


def _gradients(row: Special, dialect: str, backend: str, dtype: type) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each gradient and its limit."""
    case = special.case(row)
    forward = get_backend("numpy").prepare(case.model).run(case.feeds)
    output = case.model.graph.output[0].name
    model = refgrad.gradient(case.model, outputs=[output], dialect=dialect)
    options: dict[str, Any] = {"precision": "float64"} if dtype is np.float64 else {}
    prepared = get_backend(backend).prepare(model, **options)
    feeds = dict(case.feeds)
    feeds[f"{output}_grad"] = np.broadcast_to(np.asarray(row.cotangent, np.float32), forward[output].shape)
    feeds = widened(feeds) if dtype is np.float64 else feeds
    results = prepared.run({value.name: feeds[value.name] for value in prepared.inputs if value.name in feeds})
    for name, limit in zip(case.feeds, row.limits, strict=True):
        if limit is not None:
            yield results[f"{name}_grad"], np.array(limit, dtype)


def _agree(got: np.ndarray, limit: np.ndarray) -> bool:
    """Equal but for the digits that the table gives; what overflows in float32 alone is as large as that in float64."""
    large = np.isinf(limit) & (np.abs(got) > 1e38) & (np.sign(got) == np.sign(limit))
    return np.allclose(np.where(large, limit, got), limit, rtol=2e-6, atol=1e-37)


@pytest.mark.parametrize("row", special.rows(), ids=lambda row: special.case(row).name)
def test_the_limit(row: Special) -> None:
    name = special.case(row).name
    for dialect in DIALECTS:
        wide = all(_agree(*pair) for pair in _gradients(row, dialect, "numpy", np.float64))
        assert wide == (name not in IN_FLOAT64), dialect
        narrow = all(_agree(*pair) for pair in _gradients(row, dialect, "numpy", np.float32))
        assert narrow == (name not in IN_FLOAT32), dialect
        runs = "ort-cpu" in available() and (ortbuilder.available() or (dialect == "onnx" and not row.domain))
        if runs and row.opset <= 21:
            known = name in IN_FLOAT32 or (ortbuilder.available() and (dialect, name) in OF_RUNTIME)
            assert all(_agree(*pair) for pair in _gradients(row, dialect, "ort-cpu", np.float32)) or known, dialect


def test_a_wrong_limit_is_seen() -> None:
    for got, limit in _gradients(special.rows()[0], "onnx", "numpy", np.float32):
        assert _agree(got, limit)
        assert not _agree(got * np.float32(1.001), limit)
        assert not _agree(np.where(limit == 0, np.float32(np.nan), got), limit)


# The rare forms

# ONNX Runtime computes a normalization in float32 whatever its stash_type, and has no kernels for what that asks of the
# gradient. On empty tensors some of its kernels end the process.
NOT_ON_RUNTIME = ("LayerNormalization-2x3,3,3-stash_type=16-static-opset21",)


@pytest.mark.parametrize("case", list(rare.cases()), ids=str)
def test_gradient_of_a_rare_form(case: Case) -> None:
    runs = case.name not in NOT_ON_RUNTIME and all(array.size for array in case.feeds.values())
    for dialect in DIALECTS:
        assert_gradient(case, dialect, runtime=runs)


def test_a_rare_form_is_of_an_operator_of_onnx_or_onnx_runtime() -> None:
    for case in rare.cases():
        onnx.checker.check_model(case.model)

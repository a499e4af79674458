"""Every result is an array of the declared type and shape, in all types of the schema, and 16-bit floats are rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy_nodes import (
    FLOATS,
    ONNXRUNTIME,
    RANDOM,
    SIXTEEN_BIT,
    NodeCase,
    alone,
    model_of,
    models,
    node_cases,
    operators,
)
from onnx import helper, parser

from refgrad.backends import available, get_backend
from refgrad.conformance.case import qualified
from refgrad.conformance.known.bugs.bug import TRAINING, installed

pytestmark = pytest.mark.slow

NUMPY = get_backend("numpy")
PARTS = 8

# Operators whose shapes onnx infers wrongly: there ONNX Runtime decides.
WRONG_INFERENCE = {
    "Attention": "a product of unknown sizes is 0",
    "AveragePool": "SAME_LOWER with ceil_mode counts a window more",
    "ConvTranspose": "SAME_LOWER adds the output padding to the size",
    "Einsum": "of sizes 1 and n it takes the 1",
    "LinearClassifier": "without samples it has no classes either",
    "MaxPool": "SAME_LOWER with ceil_mode counts a window more",
    "Scan": "it knows the sizes of slices where no step is made, and a body of symbols tells none",
}

# Operators whose definition rounds what they compute in between, too, and one that reads elsewhere in another type.
ROUNDED_WITHIN = (
    "com.microsoft.ConvStateReplay",  # its offsets are in bytes
    "com.microsoft.GatedAdd",
    "com.microsoft.HyperConnectionLowRankMix",
    "com.microsoft.Mamba2Verify",
    "com.microsoft.RouterGateUpProj",
    "com.microsoft.ScaledSiLU",
    "com.microsoft.SwiGLU",
    "com.microsoft.VarlenCausalConvWithState",  # with a kernel_delta
)


def infer(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, onnx.TypeProto]:
    """The types that onnx infers for the sizes that are fed; of outputs the declared element type."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        tensor = value.type.tensor_type
        if isinstance(feeds.get(value.name), np.ndarray) and tensor.elem_type:
            tensor.shape.CopyFrom(onnx.TensorShapeProto())
            for size in feeds[value.name].shape:
                tensor.shape.dim.add().dim_value = size
    for value in copy.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
    return {value.name: value.type for value in (*inferred.value_info, *inferred.output)}


def misdeclared(value: Any, declared: onnx.TypeProto) -> str:
    """What is wrong with the type or shape of a value, "" for nothing; "shape" at the front where it is the shape."""
    if not declared.HasField("tensor_type"):
        return ""
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__} and no array"
    tensor = declared.tensor_type
    if tensor.elem_type and value.dtype != helper.tensor_dtype_to_np_dtype(tensor.elem_type):
        return f"of {value.dtype}, declared as {helper.tensor_dtype_to_np_dtype(tensor.elem_type)}"
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    if tensor.HasField("shape") and (
        len(dims) != value.ndim or any(d not in (None, n) for d, n in zip(dims, value.shape, strict=True))
    ):
        return f"shape {value.shape}, inferred as {dims}"
    return ""


@pytest.mark.parametrize("part", range(PARTS))
def test_every_value_has_the_declared_type_and_shape(part):
    wrong = []
    for name, model, feeds in models(slice(part, None, PARTS)):
        values = NUMPY.prepare(model).run(feeds, trace=True)
        for key, declared in infer(model, feeds).items():
            fault = misdeclared(values[key], declared) if key in values else ""
            operators = {node.op_type for node in model.graph.node}
            if fault.startswith("shape") and operators & WRONG_INFERENCE.keys() and "ort-cpu" in available():
                results = ONNXRUNTIME.run(model, feeds)
                if not isinstance(results, str):  # it refuses some of these shapes
                    outputs = [value.name for value in model.graph.output]
                    assert [values[o].shape for o in outputs] == [result.shape for result in results], name
                fault = ""
            if fault:
                wrong.append(f"{name}: {key} is {fault}")
    assert not wrong, "\n".join(wrong)


def typed(case: NodeCase, names: list[str], kind: np.dtype[Any]) -> dict[str, np.ndarray]:
    """The values of a case with those of `names` in another type; whole numbers for integers, of which none divides by 0."""
    values = dict(case.values)
    for name in names:
        x = values[name]
        if kind not in FLOATS and x.dtype in FLOATS:
            x = np.rint(np.nan_to_num(x.astype(np.float64), nan=0, posinf=9, neginf=-9))
        x = np.abs(x) if kind.kind == "u" else x
        if kind not in FLOATS and case.node.op_type in ("Div", "Mod", "Pow", "Range"):
            x = np.where(x == 0, 1, x)
        with np.errstate(all="ignore"):
            values[name] = x.astype(kind)
    return values


# Attributes of these say which integers a cache holds.
_ATTENTIONS = ("GroupQueryAttention", "PagedAttention", "DynamicSparseAttention", "SparsePagedAttention")
CACHED = tuple(f"com.microsoft.{name}" for name in _ATTENTIONS)


def retyped(operator: str) -> Iterator[tuple[NodeCase, np.dtype[Any], dict[str, np.ndarray]]]:
    """Every case of an operator in every type of its schema."""
    for case in node_cases(operator):
        for variable, names in case.variables().items():
            have = case.values[names[0]].dtype
            for kind in case.allowed(variable):
                numeric = have.kind != "O" and (have.kind == "b") == (kind.kind == "b")
                if operator == "BitCast":
                    numeric = kind.itemsize == have.itemsize
                elif operator in CACHED:
                    numeric = have in FLOATS and kind in FLOATS
                elif operator == "ai.onnx.ml.Imputer":
                    numeric = kind in FLOATS  # the attribute for integers is another
                elif names == ["zero_points"]:
                    numeric = (kind in FLOATS) == (have in FLOATS)  # packed in bytes they have another shape
                if numeric:
                    yield case, kind, typed(case, names, kind)


def test_the_operators_are_known_before_their_models():
    found = {qualified(case.node) for case in map(alone, *zip(*models(), strict=True)) if case}
    assert set(operators()) == found


@pytest.mark.matrix
@pytest.mark.parametrize("operator", operators())
def test_runs_in_every_type_of_the_schema(operator):
    wrong = []
    for case, kind, values in retyped(operator):
        model = model_of(case, values)
        results = NUMPY.prepare(model).run(values)
        for value in onnx.shape_inference.infer_shapes(model).graph.output:
            fault = misdeclared(results[value.name], value.type)
            if fault and not fault.startswith("shape"):
                wrong.append(f"{case} in {kind}: {value.name} is {fault}")
        if kind in SIXTEEN_BIT and operator not in (*RANDOM, "BitCast", *ROUNDED_WITHIN):
            wrong += [f"{case} in {kind}: {fault}" for fault in rounded_more_than_once(case, kind, values, results)]
    assert not wrong, "\n".join(wrong)


def ulp(x: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """The distance between two numbers of `kind` at x."""
    info = ml_dtypes.finfo(kind)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), float(info.smallest_normal))))
    return np.asarray(2.0 ** (exponent - info.nmant))


def rounded_more_than_once(
    case: NodeCase, kind: np.dtype[Any], values: Mapping[str, np.ndarray], results: Mapping[str, Any]
) -> list[str]:
    """The outputs that differ from the result in double by more than half an ulp, and what float32 is off by."""
    wide = {name: v.astype(np.float32) if v.dtype == kind else v for name, v in values.items()}
    model = model_of(case, wide)
    exact, single = NUMPY.prepare(model, precision="float64").run(wide), NUMPY.prepare(model).run(wide)
    wrong = []
    for name, result in results.items():
        if isinstance(result, np.ndarray) and result.dtype == kind:
            got, expected, near = (v.astype(np.float64) for v in (result, exact[name], single[name]))
            finite = np.isfinite(got) & np.isfinite(expected) & np.isfinite(near)
            with np.errstate(all="ignore"):
                slack = 8 * np.max(np.abs(near - expected), where=finite, initial=0)
                slack += 1e-6 * np.max(np.abs(expected), where=finite, initial=0)
                excess = np.abs(got - expected) - 0.501 * ulp(np.where(finite, expected, 1), kind) - slack
                overflow = np.abs(expected) < 0.99 * float(ml_dtypes.finfo(kind).max)
            if (excess > 0).any(where=finite):
                wrong.append(f"{name} is off by {np.max(excess, where=finite, initial=0):.3g} more")
            if (np.isnan(got) != np.isnan(expected)).any() or (np.isinf(got) & overflow).any():
                wrong.append(f"{name} is not finite")
    return wrong


# What integers may differ by from ONNX Runtime's, and why.
OFF_BY_ONE = {
    "ReduceLogSumExp": "a logarithm that is a whole number but for its rounding is cut",
    "Resize": "ONNX Runtime resizes small integers in fixed point",
    "Upsample": "ONNX Runtime resizes small integers in fixed point",
}


# What is not compared with ONNX Runtime, and why.
NOT_COMPARED = {
    **dict.fromkeys(RANDOM, "random"),
    "CastLike": "infinities and NaN have no integer",
    "MaxUnpool": "with an output_shape the indices are of the plane without it, as in onnx's node test",
}
if TRAINING in installed():
    NOT_COMPARED["com.microsoft.MultiHeadAttention"] = "release 1.19 masks the second sample otherwise than 1.31"


def undefined(case: NodeCase, values: Mapping[str, np.ndarray]) -> bool:
    """True if ONNX Runtime leaves results of this case undefined."""
    if case.node.op_type == "RNN":  # the state of an empty sequence is unwritten
        return not values.get("sequence_lens", np.ones(1)).all()
    if case.node.op_type == "Attention":  # the −∞ of a hidden key is cast to the mask's integers: docs/findings.md
        given = {a.name: a.i for a in case.node.attribute}
        windows = [given.get(f"{side}_window_size", -1) for side in ("left", "right")]
        return given.get("is_causal", 0) == 1 or max(windows) >= 0 or "nonpad_kv_seqlen" in case.node.input
    return False


@pytest.mark.matrix
@pytest.mark.skipif("ort-cpu" not in available(), reason="onnxruntime is not installed")
@pytest.mark.parametrize("operator", [name for name in operators() if name not in NOT_COMPARED])
def test_integers_are_those_of_onnx_runtime(operator):
    wrong, seen = [], set()
    for case, kind, values in retyped(operator):
        key = case.schema.since_version, kind, tuple(v.dtype for v in values.values())
        if kind.kind not in "iu" or key in seen:
            continue
        if undefined(case, values):
            continue
        seen.add(key)
        model = model_of(case, values)
        expected = ONNXRUNTIME.run(model, values)
        if isinstance(expected, str):
            continue  # it has no kernel for the type
        results = NUMPY.prepare(model).run(values)
        for (name, got), value in zip(results.items(), expected, strict=True):
            if isinstance(value, np.ndarray) and value.dtype != object:
                fits = got.dtype == value.dtype and got.shape == value.shape
                tolerance = 1 if operator in OFF_BY_ONE else 0 if value.dtype.kind in "biu" else 1e-5
                if not fits or not np.allclose(got, value, 0 if tolerance == 1 else tolerance, tolerance, True):
                    wrong.append(f"{case} in {kind}: {name} is {got.ravel()[:4]}, {value.ravel()[:4]} there")
    assert not wrong, "\n".join(wrong)


LONG = 4096

# Body with the inputs x, w, ..., and their shapes: sums, or products, of 4096 elements.
SUMS: dict[str, tuple[tuple[int, ...], ...]] = {
    **{f"y = {name} <keepdims = 0> (x)": ((2, LONG),) for name in ("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2")},
    **{f"y = {name} (x)": ((LONG, 2),) for name in ("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")},
    "i = Constant <value_ints = [0]> () y = ReduceSum(x, i)": ((LONG, 3),),
    "i = Constant <value_int = 0> () y = CumSum(x, i)": ((LONG, 2),),
    f"y = Sum({', '.join(['x'] * 300)})": ((3,),),
    f"y = Mean({', '.join(['x'] * 300)})": ((3,),),
    "y = MatMul(x, w)": ((2, LONG), (LONG, 3)),
    "y = Gemm <alpha = 0.3> (x, w)": ((2, LONG), (LONG, 3)),
    'y = Einsum <equation = "ij,jk->ik"> (x, w)': ((2, LONG), (LONG, 3)),
    "y = Conv(x, w)": ((1, 1, 64, 64), (2, 1, 64, 64)),
    "y = ConvTranspose <strides = [64, 64]> (x, w)": ((1, LONG, 1, 1), (LONG, 1, 2, 2)),
    "y = AveragePool <kernel_shape = [64, 64]> (x)": ((1, 2, 64, 64),),
    "y = LpPool <kernel_shape = [64, 64]> (x)": ((1, 2, 64, 64),),
    "y = GlobalAveragePool(x)": ((1, 2, 64, 64),),
    "y = GlobalLpPool(x)": ((1, 2, 64, 64),),
    "y = Softmax(x)": ((2, LONG),),
    "y = LogSoftmax <axis = 0> (x)": ((LONG, 2),),
    "y = LpNormalization <p = 1> (x)": ((2, LONG),),
    "y = LpNormalization <axis = 0> (x)": ((LONG, 2),),
    "y = LRN <size = 4095> (x)": ((1, LONG, 1, 1),),
    "y = LayerNormalization(x, w)": ((2, LONG), (LONG,)),
    "y = RMSNormalization(x, w)": ((2, LONG), (LONG,)),
    "y = InstanceNormalization(x, w, w)": ((1, 2, LONG), (2,)),
    "y = GroupNormalization <num_groups = 1> (x, w, w)": ((1, 2, LONG), (2,)),
    "y = MeanVarianceNormalization(x)": ((2, 2, 64, 64),),
    "y, m, v = BatchNormalization <training_mode = 1> (x, w, w, w, w)": ((2, 2, LONG), (2,)),
    "l = Constant <value_ints = [0, 1]> () c = Expand(l, n) y, z = SoftmaxCrossEntropyLoss(x, c)": ((LONG, 3, 2),),
    'l = Constant <value_ints = [0, 1]> () c = Expand(l, n) y = NegativeLogLikelihoodLoss <reduction = "sum"> (x, c)': (
        (LONG, 3, 2),
    ),
    "y = Attention(w, x, x)": ((1, 1, LONG, 2), (1, 1, 8, 2)),
    'z = Constant <value_ints = [0]> () i = Expand(z, n1) y = ScatterElements <reduction = "add"> (w, i, x)': (
        (LONG,),
        (2,),
    ),
    'z = Constant <value_ints = [0]> () i = Expand(z, n2) y = ScatterND <reduction = "add"> (w, i, x)': ((LONG,), (2,)),
    "y = DFT(x, , i1)": ((1, LONG, 1),),
    "y = com.microsoft.FusedMatMul <alpha = 0.3> (x, w)": ((2, LONG), (LONG, 3)),
    "s = Constant <value_ints = [2]> () z = Constant <value_ints = [0]> () i = Expand(z, n1) "
    "y = com.microsoft.GatherGrad(s, i, x)": ((LONG,),),
    "s = Constant <value_ints = [2]> () z = Constant <value_ints = [0]> () i = Expand(z, n1) "
    "y = com.microsoft.GatherElementsGrad(x, s, i)": ((LONG,),),
    "y = com.microsoft.ReduceSumTraining(x, i0)": ((LONG, 2),),
    "y = com.microsoft.SoftmaxGrad_13 <axis = 0> (x, w)": ((LONG, 2), (LONG, 2)),
    "y = com.microsoft.LogSoftmaxGrad_13 <axis = 0> (x, w)": ((LONG, 2), (LONG, 2)),
    "y, z = com.microsoft.DivGrad(x, w, w)": ((LONG, 2), (2,)),
}


@pytest.mark.parametrize("kind", SIXTEEN_BIT, ids=str)
@pytest.mark.parametrize(("body", "shapes"), SUMS.items(), ids=[body[:70] for body in SUMS])
def test_sixteen_bits_are_rounded_once_after_long_sums(body, shapes, kind):
    """Sums in 16 bits stop growing at 2048 or 256 of their terms."""
    rng = np.random.default_rng(1)
    fed = {name: (0.01 + rng.random(shape) / 4).astype(kind) for name, shape in zip("xw", shapes, strict=False)}
    element = {np.dtype(np.float16): "float16", np.dtype(np.float32): "float"}.get(kind, "bfloat16")

    def model(element: str) -> onnx.ModelProto:
        inputs = ", ".join(f"{element}[{', '.join(map(str, v.shape))}] {name}" for name, v in fed.items())
        return parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
            g ({inputs}) => ({element} y)
            <int64[2] n = {{{LONG}, 2}}, int64[1] n1 = {{{LONG}}}, int64[2] n2 = {{{LONG}, 1}}, int64[1] i0 = {{0}},
            int64 i1 = {{1}}>
            {{ {body} }}""")

    result = run(model(element), fed)
    wide = {name: v.astype(np.float32) for name, v in fed.items()}
    exact = run(model("float"), wide, precision="float64")
    assert result.dtype == kind
    scale = np.max(np.abs(exact))
    error = np.abs(result.astype(np.float64) - exact)
    assert (error <= 0.5001 * ulp(exact, kind) + 2e-5 * scale).all(), f"{np.max(error / ulp(exact, kind)):.2f} ulp"


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], **options: Any) -> np.ndarray:
    output = model.graph.output[0].type.tensor_type
    output.ClearField("shape")
    return np.asarray(NUMPY.prepare(model, **options).run(feeds)["y"])

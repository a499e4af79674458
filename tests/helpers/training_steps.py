"""The operators of ONNX Runtime's training that are no gradients: steps of algorithms, and results by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper
from training_operators import MICROSOFT, NUMPY, REDUCTIONS, numbers, positive, spread, whole

W, G = np.array([1.0, -2.0, 3.0]), np.array([0.5, 0.25, -1.0])
M, V = np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5, 0.6])
ADAM = {"R": np.array(0.1), "T": np.array(3), "W": W, "G": G, "m": M, "v": V}
ADAM_RESULTS = ("T_next", "m_next", "v_next", "W_next", "step")
SEQUENCES = {"R": np.array(0.1), "T": np.array(3), "W": [W, W[:2]], "G": [G, G[:2]], "m": [M, M[:2]], "v": [V, V[:2]]}
MATRIX = numbers(2, 3)


@dataclass(eq=False)
class Step:
    """An operator that reads `feeds`, of which None are left out, and makes `results`."""

    op: str
    feeds: dict[str, Any]
    results: tuple[str, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    domain: str = MICROSOFT
    double: bool = False

    def __str__(self) -> str:
        shapes = [str(np.shape(v)) for v in self.feeds.values() if not isinstance(v, list)]
        return "-".join((self.op, *shapes, *(f"{k}={v}" for k, v in self.attrs.items()))).replace(" ", "")


def quantized(zero_point: float, **attrs: int) -> Step:
    feeds = {"X": spread(4, 5), "scale": np.array(0.3), "zero_point": np.array(zero_point)}
    return Step("FakeQuant", feeds, ("Y", "mask"), attrs)


def fused(a: tuple[int, ...], b: tuple[int, ...], **attrs: Any) -> Step:
    return Step("FusedMatMul", {"A": numbers(*a), "B": numbers(*b)}, ("Y",), attrs)


STEPS = [
    *(
        Step("AdamOptimizer", ADAM, ADAM_RESULTS, attrs)
        for attrs in (
            {},
            {"alpha": 0.5, "beta": 0.75, "epsilon": 0.1},
            {"epsilon": 0.1, "do_bias_correction": 0},
            {"epsilon": 0.1, "weight_decay_mode": 1},
            {"epsilon": 0.1, "weight_decay_mode": 1, "do_bias_correction": 0},
        )
    ),
    Step("AdamOptimizer", ADAM | {"R": np.array([0.1]), "T": np.array([1])}, ADAM_RESULTS[:4]),
    *(
        Step("AdamWOptimizer", SEQUENCES | flag, ("done", "W_next", "m_next", "v_next"), attrs)
        for flag in ({}, {"update": np.array(True)}, {"update": np.array(False)})
        for attrs in (
            {},
            {"alpha": 0.5, "beta": 0.75, "epsilon": 0.1, "weight_decay": 0.5},
            {"adam_mode": 1, "epsilon": 0.1, "weight_decay": 0.5},
            {"adam_mode": 1, "correct_bias": 0},
        )
    ),
    Step("SGDOptimizer", {"R": np.array(0.1), "W": W, "G": G}, ("W_next", "step")),
    *(
        Step("SGDOptimizerV2", {k: SEQUENCES[k] for k in "RWG"} | flag, ("done", "W_next"))
        for flag in ({}, {"update": np.array(True)}, {"update": np.array(False)})
    ),
    *(Step("InplaceClipGradNorm", {"G": SEQUENCES["W"]}, ("Y",), {"max_norm": n}) for n in (1.0, 100.0, 0.0)),
    *(
        Step(op, {"old": MATRIX, "new": 2 * MATRIX} | flag, results)
        for op, results in (("InPlaceAccumulator", ("Y",)), ("InPlaceAccumulatorV2", ("done", "Y")))
        for flag in ({}, {"flag": np.array([True])}, {"flag": np.array([False])})
    ),
    *(Step("ReduceAllL2", feeds, ("Y",)) for feeds in ({"A": W}, {"A": W, "B": MATRIX, "C": np.array(2.0)})),
    Step("ZeroGradient", {"X": MATRIX, "signal": np.zeros(0, np.int64)}, ("Y",)),
    *(
        Step("Scale", {"X": MATRIX, "scale": np.asarray(scale)}, ("Y",), {"scale_down": down}, double=True)
        for scale in (2.5, 3, np.array([2.5]), np.array(3, np.int32))
        for down in (0, 1)
    ),
    *(
        Step("BroadcastGradientArgs", {"a": np.array(a, np.int64), "b": np.array(b, np.int64)}, ("a_axes", "b_axes"))
        for a, b in (
            ([2, 3], [2, 3]),
            ([2, 3], []),
            ([], [4, 5]),
            ([], []),
            ([2, 1, 4], [3, 1]),
            ([1, 1], [1, 1, 1]),
            ([2, 16, 1024, 1], [1, 1024, 1024]),
            ([0, 3], [1, 3]),
            ([1], [0]),
        )
    ),
    *(
        Step("ReduceSumTraining", {"X": numbers(2, 3, 4), "axes": np.array(axes, np.int64)}, ("Y",), attrs, double=True)
        for axes in ([], [1], [-1, 0], [0, 1, 2])
        for attrs in ({}, {"keepdims": 0}, {"noop_with_empty_axes": 1})
        if not (attrs == {"noop_with_empty_axes": 1} and axes)
    ),
    *(
        Step("ConcatTraining", {f"x{i}": numbers(*s) for i, s in enumerate(shapes)}, ("Y", "lengths"), {"axis": axis})
        for shapes, axis in (
            (((2, 3),), 0),
            (((2, 3), (2, 1), (2, 0)), 1),
            (((2, 3), (4, 3)), -2),
            (((2, 3, 4), (2, 3, 4)), -1),
        )
    ),
    *(
        Step("SplitTraining", {"X": numbers(2, 6, 2), "split": np.array(split)}, ("a", "b", "c"), {"axis": axis})
        for split, axis in (([1, 2, 3], 1), ([2, 2, 2], -2), ([0, 5, 1], 1))
    ),
    Step("SplitTraining", {"X": numbers(6, 2), "split": np.zeros(0, np.int64)}, ("a", "b", "c")),
    *(
        Step("Trilu", {"X": numbers(2, 3, 4), **k}, ("Y",), {"upper": upper})
        for upper in (0, 1)
        for k in ({}, {"k": np.array(-1)}, {"k": np.array(2)})
    ),
    *(
        Step("ShrunkenGather", {"X": numbers(4, 5), "i": np.array(i, kind)}, ("Y",), {"axis": axis})
        for i, axis in (([0], 0), ([1, -1, 1], 1), ([3, 0], -2))
        for kind in (np.int64, np.int32)
    ),
    fused((2, 3), (3, 4)),
    fused((3, 2), (3, 4), transA=1, alpha=0.5),
    fused((2, 3), (4, 3), transB=1),
    fused((2, 5, 3, 2), (5, 4, 3), transA=1, transB=1),
    fused((2, 5, 3), (5, 3, 4), transBatchA=1),
    fused((5, 2, 3), (3, 5, 4), transBatchB=1, alpha=2.0),
    fused((2, 5, 3), (4, 5, 3), transBatchA=1, transBatchB=1, transB=1),
    quantized(2.0),
    quantized(0.0, quant_min=-3, quant_max=2),
    quantized(-1.0, quant_min=-8, quant_max=7),
    Step("FakeQuantGrad", {"dY": MATRIX, "mask": MATRIX > 0}, ("dX",)),
    *(
        Step("BatchNormInternal", {"X": numbers(4, 3, 2), "S": W, "B": G, "mean": M, "var": V}, results, attrs)
        for results, attrs in (
            (("Y", "running_mean", "running_var", "batch_mean", "r"), {"epsilon": 0.1, "momentum": 0.3}),
            (("Y",), {"training_mode": 0}),
        )
    ),
    *(
        Step("SoftmaxCrossEntropyLossInternal", feeds, ("Y", "log_prob"), {"reduction": reduction})
        for feeds in (
            {"X": numbers(4, 3), "label": whole(3, 4)},
            {"X": numbers(2, 3, 5), "label": whole(3, 2, 5), "weight": positive(3)},
            {"X": numbers(4, 3), "label": whole(3, 4), "weight": None, "ignored": np.array(1)},
            {"X": numbers(2, 3), "label": np.array([1, 1]), "weight": positive(3), "ignored": np.array(1)},
        )
        for reduction in REDUCTIONS
    ),
    *(
        Step("NegativeLogLikelihoodLossInternal2", feeds, ("Y",), {"reduction": reduction})
        for feeds in (
            {"X": numbers(2, 3, 5), "label": whole(3, 2, 5), "weight": positive(3)},
            {"X": numbers(4, 3), "label": whole(3, 4), "weight": None, "ignored": np.array(1)},
            {"X": numbers(2, 3), "label": np.array([1, 1]), "weight": None, "ignored": np.array(1)},
        )
        for reduction in REDUCTIONS
    ),
    *(
        Step(op, {"X": numbers(2, 3, 4), **label}, ("Y", "log_prob"), {"reduction": reduction}, domain)
        for op, domain, label in (
            ("SoftmaxCrossEntropy", MICROSOFT, {"label": positive(2, 3, 4)}),
            ("SparseSoftmaxCrossEntropy", "", {"label": whole(4, 2, 3)}),
            ("SparseSoftmaxCrossEntropy", "", {"label": whole(4, 2, 3), "weight": positive(2, 3)}),
        )
        for reduction in ("mean", "sum")
    ),
]


def step_model(step: Step, feeds: Mapping[str, Any]) -> onnx.ModelProto:
    def declare(name: str, value: Any) -> onnx.ValueInfoProto:
        if isinstance(value, list):
            element = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value[0].dtype), None)
            return helper.make_value_info(name, helper.make_sequence_type_proto(element))
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    reads = [name if value is not None else "" for name, value in step.feeds.items()]
    node = helper.make_node(step.op, reads, step.results, "node", domain=step.domain, **step.attrs)
    inputs = [declare(name, value) for name, value in feeds.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in step.results if name]
    if step.op == "ReduceAllL2":  # its output's type follows from nothing
        outputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in step.results]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=opsets, ir_version=8)


# What has no CPU kernel and no derivative to compare with: results that can be worked out by hand.

X = np.array([[1.0, -2.0], [3.0, 4.0]])
INF = np.array([1.0, np.inf, np.nan])
SEED = 3
MASK = NUMPY.prepare(
    step_model(
        Step("Dropout", {"X": X, "r": np.array(0.2), "t": np.array(True)}, ("Y", "mask"), {"seed": SEED}, ""),
        {"X": X, "r": np.array(0.2), "t": np.array(True)},
    )
).run({"X": X, "r": np.array(0.2), "t": np.array(True)})["mask"]
DROPPING = {"r": np.array(0.2), "t": np.array(True)}
LAMB = {"update": None, "loss_scale": None, "norm": None, "R": np.array(0.5), "T": np.array(1)}
GROUP = {"W": np.array([3.0, 4.0]), "G": np.array([2.0, -2.0]), "m": np.zeros(2), "v": np.zeros(2)}
LAMB_STEP = np.array([1.0, -1.0]) * 2.5 / np.sqrt(2)

BY_HAND: list[tuple[Step, dict[str, Any]]] = [
    (Step("BatchScale", {"X": X}, ("a", "b"), {"scale_0": 2.0, "scale_1": 0.5}), {"a": 2 * X, "b": 0.5 * X}),
    (
        Step("BatchScale", {"X": X}, ("a", "b", "c"), {"scale_0": 2.0, "scale_1": 0.5, "scale_2": -1.0}),
        {"a": 2 * X, "b": 0.5 * X, "c": -X},
    ),
    (Step("ScaledSum", {"A": X, "B": X}, ("Y",), {"scale_0": 2.0, "scale_1": 0.5}), {"Y": 2.5 * X}),
    (
        Step("ScaledSum", {"A": X, "B": X, "C": X}, ("Y",), {"scale_0": 2.0, "scale_1": 0.5, "scale_2": 1.5}),
        {"Y": 4 * X},
    ),
    (
        Step("BiasDropout", {"X": X, "B": X[0], "residual": X, **DROPPING}, ("Y", "mask"), {"seed": SEED}),
        {"Y": np.where(MASK, 1.25 * (X + X[0]), 0) + X, "mask": MASK},
    ),
    (Step("BiasDropout", {"X": X, "B": X[0]}, ("Y",)), {"Y": X + X[0]}),
    (
        Step("BitmaskBiasDropout", {"X": X, "B": X[0], "residual": X, **DROPPING}, ("Y", "mask"), {"seed": SEED}),
        {
            "Y": np.where(MASK, 1.25 * (X + X[0]), 0) + X,
            "mask": np.array([sum(1 << i for i, kept in enumerate(MASK.flat) if kept)], np.uint32),
        },
    ),
    (
        Step("BitmaskDropout", {"X": np.ones((3, 11))}, ("Y", "mask")),
        {"Y": np.ones((3, 11)), "mask": np.array([2**32 - 1, 1], np.uint32)},
    ),
    (
        Step(
            "BitmaskDropoutGrad", {"dY": np.arange(1.0, 35.0), "mask": np.array([5, 2], np.uint32), **DROPPING}, ("dX",)
        ),
        {"dX": 1.25 * np.array([1.0, 0.0, 3.0, *[0.0] * 30, 34.0])},
    ),
    (
        Step("FlattenAndUnpad", {"X": X, "i": np.array([3, 0])}, ("Y", "dims")),
        {"Y": np.array([4.0, 1.0]), "dims": np.array([2, 2])},
    ),
    (Step("IsFinite", {"X": INF}, ("Y",)), {"Y": np.array([True, False, False])}),
    (Step("IsAllFinite", {"A": X, "B": X[0]}, ("Y",)), {"Y": np.array(True)}),
    (Step("IsAllFinite", {"A": X, "B": INF}, ("Y",)), {"Y": np.array(False)}),
    (Step("IsAllFinite", {"A": INF[:2]}, ("Y",), {"isnan_only": 1}), {"Y": np.array(True)}),
    (Step("IsAllFinite", {"A": INF[:2]}, ("Y",), {"isinf_only": 1}), {"Y": np.array(False)}),
    (Step("IsAllFinite", {"A": INF[::2]}, ("Y",), {"isinf_only": 1}), {"Y": np.array(True)}),
    (Step("IsAllFinite", {"A": INF[::2]}, ("Y",), {"isnan_only": 1}), {"Y": np.array(False)}),
    (
        Step("BitmaskDropout", {"X": X, **DROPPING}, ("Y", "mask"), {"seed": SEED}),
        {
            "Y": np.where(MASK, 1.25 * X, 0),
            "mask": np.array([sum(1 << i for i, kept in enumerate(MASK.flat) if kept)], np.uint32),
        },
    ),
    *(
        (
            Step(
                "BiasSoftmaxDropout",
                {"X": 0 * X[None], "B": 0 * X[None], "r": np.array(0.2)},
                ("Y", "mask", "shares"),
                {"axis": axis, "is_inner_broadcast": 0, "seed": SEED},
            ),
            {"Y": np.where(MASK, 1.25 * share, 0)[None], "mask": MASK[None], "shares": np.full((1, 2, 2), share)},
        )
        for axis, share in ((1, 0.25), (2, 0.5))
    ),
    *(
        (
            Step("NegativeLogLikelihoodLossInternal", feeds, ("Y",), {"reduction": reduction}),
            {"Y": np.array(expected)},
        )
        for feeds, reduction, expected in (
            ({"X": X, "label": np.array([1, 0])}, "sum", -1.0),
            ({"X": X, "label": np.array([1, 0]), "weight": np.array([3.0, 1.0])}, "mean", -7 / 4),
            ({"X": X, "label": np.array([1, 0]), "weight": None, "ignored": np.array(1)}, "none", [0.0, -3.0]),
        )
    ),
    (Step("All", {"X": X > -3}, ("Y",)), {"Y": np.array(True)}),
    (Step("All", {"X": X > 0}, ("Y",)), {"Y": np.array(False)}),
    (
        Step("View", {"X": X, "a": np.array([3]), "b": np.array([1, 1])}, ("Y", "Z")),
        {"Y": np.array([1.0, -2.0, 3.0]), "Z": np.array([[4.0]])},
    ),
    (
        Step("MixedPrecisionScale", {"s": np.array(2.0), "A": X, "B": X[0]}, ("Y", "Z"), {"to": 10}),
        {"Y": (2 * X).astype(np.float16), "Z": (2 * X[0]).astype(np.float16)},
    ),
    (
        Step("MixedPrecisionScale", {"s": np.array([2.0]), "A": X, "B": X[0]}, ("Y",), {"to": 11, "fuse_outputs": 1}),
        {"Y": np.array([2.0, -4.0, 6.0, 8.0, 2.0, -4.0])},
    ),
    # m/(1 − α) = G and v/(1 − β) = G², so d = G/|G| = (1, −1); the step is −0.5·(‖W‖/‖d‖ = 5/√2)·d, or −0.5·2·d
    (
        Step(
            "LambOptimizer",
            LAMB | GROUP,
            ("T_next", "W_next", "step"),
            {"alpha": [0.5], "beta": [0.5], "epsilon": [0.0]},
        ),
        {"T_next": np.array(2), "W_next": GROUP["W"] - LAMB_STEP, "step": -LAMB_STEP},
    ),
    (
        Step(
            "LambOptimizer", LAMB | GROUP, ("", "W_next", "", "m_next", "v_next"), {"epsilon": [1e-9], "ratio_max": 2.0}
        ),
        {"W_next": np.array([2.0, 5.0]), "m_next": np.array([0.2, -0.2]), "v_next": np.array([0.004, 0.004])},
    ),
    (
        Step(
            "LambOptimizer",
            LAMB | GROUP,
            ("", "W_next", "", "", "v_next"),
            {"alpha": [0.0], "beta": [0.75], "epsilon": [1.0], "do_bias_correction": 0, "ratio_min": 9.0},
        ),
        {"W_next": GROUP["W"] - 4.5 * np.array([1.0, -1.0]), "v_next": np.array([1.0, 1.0])},
    ),
    (
        Step("LambOptimizer", LAMB | {"update": np.array(False)} | GROUP, ("T_next", "W_next")),
        {"T_next": np.array(1), "W_next": GROUP["W"]},
    ),
    (
        Step(
            "LambOptimizer", LAMB | {"loss_scale": np.array(4.0), "norm": np.array(2.0)} | GROUP, ("", "", "", "m_next")
        ),
        {"m_next": np.array([0.05, -0.05])},
    ),
    (
        Step("LambOptimizer", LAMB | {"norm": np.array(6.0)} | GROUP, ("", "", "", "m_next"), {"max_norm_clip": [3.0]}),
        {"m_next": np.array([0.1, -0.1])},
    ),
    # the gradient is divided by 4, and its norm 6/4 is above 1: by 6
    (
        Step(
            "LambOptimizer",
            LAMB | {"loss_scale": np.array(4.0), "norm": np.array(6.0)} | GROUP,
            ("", "", "", "m_next"),
            {"alpha": [0.5]},
        ),
        {"m_next": np.array([1 / 6, -1 / 6])},
    ),
    (
        Step("AdamOptimizer", ADAM | {"narrow": W.astype(np.float16)}, (*ADAM_RESULTS, "half"), {"epsilon": 1e9}),
        {"W_next": W, "half": W.astype(np.float16)},
    ),
    (
        Step(
            "AdamOptimizer",
            ADAM | {"narrow": None, "loss_scale": np.array(4.0), "norm": np.array(6.0)},
            ADAM_RESULTS[:2],
            {"alpha": 0.5},
        ),
        {"m_next": 0.5 * M + 0.5 * G / 6},
    ),
    (
        Step(
            "AdamOptimizer",
            ADAM | {"narrow": None, "loss_scale": np.array(4.0), "norm": np.array(2.0)},
            ADAM_RESULTS[:2],
            {"alpha": 0.5},
        ),
        {"m_next": 0.5 * M + 0.5 * G / 4},
    ),
    (
        Step(
            "AdamOptimizer",
            ADAM | {"narrow": None, "loss_scale": None, "norm": np.array(6.0)},
            ADAM_RESULTS[:2],
            {"alpha": 0.5, "max_norm_clip": 3.0},
        ),
        {"m_next": 0.5 * M + 0.5 * G / 2},
    ),
    (
        Step("AdamOptimizer", ADAM | dict.fromkeys(("a", "b", "c")) | {"update": np.array(False)}, ADAM_RESULTS[:4]),
        {"T_next": np.array(3), "m_next": M, "v_next": V, "W_next": W},
    ),
    (
        Step(
            "SoftmaxCrossEntropyLossInternal",
            {"X": np.zeros((1, 2)), "label": np.array([0])},
            ("Y",),
            {"output_type": 10},
        ),
        {"Y": np.array(np.log(2), np.float16)},
    ),
    (
        Step(
            "SoftmaxCrossEntropyLossInternalGrad",
            {
                "dY": np.array(1.0),
                "p": np.log([[0.5, 0.5]]),
                "label": np.array([0]),
                "w": None,
                "i": None,
                "bias": X[:1],
            },
            ("dX",),
            {"output_type": 10},
        ),
        {"dX": np.array([[0.5, -1.5]], np.float16)},
    ),
    (Step("SplitTraining", {"X": X[1], "s": np.zeros(0, np.int64)}, ("a", "b", "c")), {"a": X[1, :1], "c": X[1, 2:]}),
    (Step("Group", {"X": X, "Y": INF}, ("done",)), {"done": np.array(True)}),
    (Step("PassThrough", {"X": X, "Y": INF}, ("a", "b")), {"a": X, "b": INF}),
]

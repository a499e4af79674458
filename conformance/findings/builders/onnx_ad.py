"""Findings about onnx-ad."""

from __future__ import annotations

from functools import partial

import numpy as np

from refgrad.conformance.findings.builders.finding import ONNX_AD, BuilderFinding, about
from refgrad.conformance.findings.finding import f32

_about = partial(about, ONNX_AD, (ONNX_AD,))


def _pooled(
    operator: str, feeds: list[float], cotangent: list[float], expected: list[float], given: list[float], proof: str
) -> BuilderFinding:
    return _about(
        "takes a pad at the end for one at the front",
        "ConvTranspose has pads and output_shape: then it does not read pads, and a pad that is left over is in front",
        f"Y = {operator} <kernel_shape = [2], pads = [0, 1]> (X)",
        {"X": f32([[feeds]])},
        {"Y": f32([[cotangent]])},
        {"X": f32([[expected]])},
        {"X": f32([[given]])},
        proof,
    )


def _over_everything(operator: str, expected: list[float], proof: str) -> BuilderFinding:
    return _about(
        "takes an empty constant list of axes for no reduction",
        "the cotangent as it is; noop_with_empty_axes is 0",
        f"Y = {operator} <keepdims = 0> (X, axes)",
        {"X": f32([-3, 4])},
        {"Y": f32(1)},
        {"X": f32(expected)},
        {"X": f32([1, 1])},
        proof,
        constants="int64[0] axes = {}",
    )


def _without_reduction(operator: str, expected: float, proof: str) -> BuilderFinding:
    return _about(
        "takes a reduction over no axes for the identity",
        "the cotangent as it is; the function body applies to each element",
        f"Y = {operator} <noop_with_empty_axes = 1> (X)",
        {"X": f32([-2])},
        {"Y": f32([1])},
        {"X": f32([expected])},
        {"X": f32([1])},
        proof,
    )


FINDINGS: tuple[BuilderFinding, ...] = (
    _about(
        "takes the determinant for a constant",
        "zeros in the shape of X: the operator is in the table of those whose derivative is zero",
        "Y = Det (X)",
        {"X": f32([[2, 1], [3, 4]])},
        {"Y": f32(1)},
        {"X": f32([[4, -3], [-1, 2]])},
        {"X": f32([[0, 0], [0, 0]])},
        "x₀₀·x₁₁ − x₀₁·x₁₀ by each of the four",
    ),
    _about(
        "takes the values for constants",
        "zeros in the shape of V: the operator is in the table of those whose derivative is zero",
        "Y = OneHot (I, D, V)",
        {"I": np.array([1]), "D": np.array(2), "V": f32([0, 1])},
        {"Y": f32([[3, 4]])},
        {"V": f32([3, 4])},
        {"V": f32([0, 0])},
        "Y is V",
    ),
    _about(
        "takes the constant value for a constant where it is an input",
        "zeros in the shape of V",
        "Y = Pad (X, P, V)",
        {"X": f32([1]), "V": f32(5)},
        {"Y": f32([3, 4])},
        {"X": f32([4]), "V": f32(3)},
        {"X": f32([4]), "V": f32(0)},
        "Y is (V, X)",
        constants="int64[2] P = {1, 0}",
    ),
    _about(
        "puts the elements that negative pads removed where they were not",
        "Slice from 0 to −1, then Expand; the two that were removed in front get what is behind them",
        "Y = Pad (X, P)",
        {"X": f32([1, 2, 3])},
        {"Y": f32([4, 5])},
        {"X": f32([0, 0, 4])},
        {"X": f32([4, 4, 4])},
        "Y is (X₂, 0)",
        constants="int64[2] P = {-2, 1}",
    ),
    _about(
        "takes the mean and the variance for constants",
        "zeros in the shapes of M and V",
        "Y = BatchNormalization <epsilon = 0.0> (X, S, B, M, V)",
        {"X": f32([[5]]), "S": f32([2]), "B": f32([0]), "M": f32([1]), "V": f32([4])},
        {"Y": f32([[1]])},
        {"M": f32([-1]), "V": f32([-0.5])},
        {"M": f32([0]), "V": f32([0])},
        "Y is 2·(X − M)/√V: −2/√4, and −(5 − 1)/√4³",
    ),
    _about(
        "takes a pad at the end for one at the front",
        "ConvTranspose has pads and output_shape: then it does not read pads, and a pad that is left over is in front",
        "Y = Conv <pads = [0, 1]> (X, W)",
        {"X": f32([[[1, 2]]]), "W": f32([[[1, 2]]])},
        {"Y": f32([[[1, 3]]])},
        {"X": f32([[[1, 5]]]), "W": f32([[[7, 2]]])},
        {"X": f32([[[5, 6]]]), "W": f32([[[7, 2]]])},
        "Y is (X₀ + 2·X₁, X₁): 1 and 2·1 + 3",
    ),
    _pooled("AveragePool", [1, 2], [2, 3], [1, 4], [4, 3], "Y is ((X₀ + X₁)/2, X₁): 2/2 and 2/2 + 3"),
    _pooled("LpPool", [3, 4], [5, 1], [3, 5], [3.75, 1], "Y is (√(X₀² + X₁²), X₁): 5·3/5 and 5·4/5 + 1"),
    _about(
        "takes mode CRD for DCR",
        "DepthToSpace has mode DCR",
        'Y = SpaceToDepth <blocksize = 2, mode = "CRD"> (X)',
        {"X": f32(np.arange(8)).reshape(1, 2, 2, 2)},
        {"Y": f32(np.arange(8)).reshape(1, 8, 1, 1)},
        {"X": f32(np.arange(8)).reshape(1, 2, 2, 2)},
        {"X": f32([0, 2, 4, 6, 1, 3, 5, 7]).reshape(1, 2, 2, 2)},
        "Y is X in the same order: with CRD the depth goes first by channels, then by the place in a block",
        opset=28,
    ),
    _over_everything("ReduceMean", [0.5, 0.5], "(−3 + 4)/2"),
    _over_everything("ReduceProd", [4, -3], "−3·4"),
    _over_everything("ReduceL1", [-1, 1], "|−3| + |4|"),
    _over_everything("ReduceL2", [-0.6, 0.8], "x/√(9 + 16)"),
    _over_everything("ReduceSumSquare", [-6, 8], "2·x"),
    _over_everything("ReduceMax", [0, 1], "4 is the larger one"),
    _over_everything("ReduceMin", [1, 0], "−3 is the smaller one"),
    _without_reduction("ReduceL1", -1, "Y is |X|"),
    _without_reduction("ReduceL2", -1, "Y is √X²"),
    _without_reduction("ReduceSumSquare", -4, "Y is X²"),
    _about(
        "divides 0 by 0 where an element is 0",
        "the product divided by each element",
        "Y = ReduceProd <keepdims = 0> (X)",
        {"X": f32([0, 2])},
        {"Y": f32(3)},
        {"X": f32([6, 0])},
        {"X": f32([np.nan, 0])},
        "Y is X₀·X₁: 3·2 and 3·0",
    ),
    _about(
        "has another order of the bounds where min is above max",
        "the gradients of the bounds are taken from X < L and X > H alone",
        "Y = Clip (X, L, H)",
        {"X": f32([0, 3]), "L": f32(2), "H": f32(1)},
        {"Y": f32([1, 4])},
        {"X": f32([0, 0]), "L": f32(0), "H": f32(5)},
        {"X": f32([0, 0]), "L": f32(1), "H": f32(4)},
        "where min is greater than max, all values are max",
    ),
    _about(
        "makes NaN of a row that is masked altogether",
        "the softmax of −∞ is multiplied by the 0 that Where gives it",
        "Y = Attention <scale = 1.0> (Q, K, V, M)",
        {"Q": f32([[[[1], [1]]]]), "K": f32([[[[1]]]]), "V": f32([[[[2]]]]), "M": np.array([[True], [False]])},
        {"Y": f32([[[[1], [1]]]])},
        {"Q": f32([[[[0], [0]]]]), "K": f32([[[[0]]]]), "V": f32([[[[1]]]])},
        {"Q": f32([[[[0], [np.nan]]]]), "K": f32([[[[np.nan]]]]), "V": f32([[[[1]]]])},
        "the rows of Y are V and 0: one key has the weight 1, and in the body a row without a key is 0",
        opset=23,
    ),
    _about(
        "takes the result for a constant where sizes are not declared",
        "zeros in the shapes of X and W",
        'Y, S = CausalConvWithState <activation = "none"> (X, W)',
        {"X": f32([[[1, 2]]]), "W": f32([[[3]]])},
        {"Y": f32([[[1, 1]]])},
        {"X": f32([[[3, 3]]]), "W": f32([[[3]]])},
        {"X": f32([[[0, 0]]]), "W": f32([[[0]]])},
        "Y is W·X",
        opset=27,
        sizes=False,
    ),
    _about(
        "reads the indices as if they were into output_shape",
        "Gather with the indices from the cotangent in one row",
        "Y = MaxUnpool <kernel_shape = [1, 1]> (X, I, S)",
        {"X": f32([[[[1], [2]]]]), "I": np.array([[[[0], [1]]]]), "S": np.array([1, 1, 2, 2])},
        {"Y": f32([[[[1, 2], [3, 4]]]])},
        {"X": f32([[[[1], [3]]]])},
        {"X": f32([[[[1], [2]]]])},
        "the indices are into what the kernel makes, 2×1, which is the first column of the result",
    ),
    _about(
        "divides integers by 0 where there are no results",
        "Div of the sizes of X and Y",
        "Y = ReduceMean <keepdims = 0> (X, A)",
        {"X": f32(np.zeros((2, 0)))},
        {"Y": f32([])},
        {"X": f32(np.zeros((2, 0)))},
        "the Div node that makes",
        "there is nothing to differentiate",
        constants="int64[1] A = {0}",
    ),
    _about(
        "asks Reshape for a size that nothing tells where there are no elements",
        "Reshape to (0, 2, −1), the last being the number of cotangents: it is 0, not 1",
        "Y = Reshape <allowzero = 1> (X, S)",
        {"X": f32(np.zeros((0, 2)))},
        {"Y": f32(np.zeros((0, 3)))},
        {"X": f32(np.zeros((0, 2)))},
        "(Squeeze) failed",
        "there is nothing to differentiate",
        constants="int64[2] S = {0, 3}",
    ),
    _about(
        "pads for a slice that ends in front of its start",
        "Pad by 2 in front and 2 behind: 4 elements, where X has 3",
        "Y = Slice (X, S, E)",
        {"X": f32([1, 2, 3])},
        {"Y": f32([])},
        {"X": f32([0, 0, 0])},
        "the Expand node that makes",
        "Y is empty",
        constants="int64[1] S = {2}, int64[1] E = {1}",
    ),
    _about(
        "writes operators that the opset of the model does not have",
        "GreaterOrEqual, which is there from opset 12 on",
        "Y = Max (A, B)",
        {"A": f32([1]), "B": f32([2])},
        {"Y": f32([3])},
        {"A": f32([0]), "B": f32([3])},
        "its model is invalid",
        "Y is B",
        opset=11,
    ),
)

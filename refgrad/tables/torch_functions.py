"""The torch function of each row of the table of kinks, and the torch function that a node was exported from.

Several torch functions become the same ONNX operator, but differ where it has no derivative. relu6, hardtanh and clamp all
become Clip. At the ends, torch 2.13 has the derivative 0 for relu6 and hardtanh, and 1 for clamp.
"""

from __future__ import annotations

import re
from functools import cache
from math import inf

from onnx import NodeProto

from refgrad.tables.kinks import KinkRow

RELEASE = "2.13"  # of torch, which the tables describe
_TARGETS = (  # metadata that torch's exporter writes, and where they name the function
    ("pkg.torch.onnx.fx_node", re.compile(r"target=torch\.ops\.aten\.([\w.]+)\]")),
    ("pkg.torch.onnx.class_hierarchy", re.compile(r"'aten\.([\w.]+)'\]$")),
    ("namespace", re.compile(r"aten\.([\w.]+)$")),
)
_POOLS = re.compile(r"AdaptiveMaxPool\dd'")  # a layer whose function becomes amax
_NAMES = re.compile(
    r"(?:node_)?(hardtanh|relu6|linalg_vector_norm)(?:_\d+)?|(?:.*/)?(hardtanh|relu6)(?:_\d+)?/Clip(?:_\d+)?"
)
_OF_SEVERAL = re.compile(r"node_(max|min)(?:_\d+)?__0")  # the first result of several

# The expression that torch is asked for each row: x, y, z are the inputs of the operator.
ASKED: dict[tuple[str, str], str] = {
    ("Relu", "x = 0"): "relu(x)",
    ("LeakyRelu", "x = 0"): "nn.functional.leaky_relu(x, 0.25)",
    ("PRelu", "x = 0"): "nn.functional.prelu(x.reshape(1), y.reshape(1))",
    ("Elu", "x = 0"): "nn.functional.elu(x, 0.5)",
    ("Selu", "x = 0"): "nn.functional.selu(x)",
    ("ThresholdedRelu", "x = α"): "nn.functional.threshold(x, 1.0, 0.0)",
    ("Shrink", "|x| = λ"): "nn.functional.softshrink(x, 0.5)",
    ("HardSigmoid", "the ends of the slope"): "nn.functional.hardsigmoid(1.5 * x)",
    ("HardSwish", "|x| = 3"): "nn.functional.hardswish(x)",
    ("Abs", "x = 0"): "abs(x)",
    ("Sqrt", "x = 0"): "sqrt(x)",
    ("Log", "x = 0"): "log(x)",
    ("Reciprocal", "x = 0"): "reciprocal(x)",
    ("Asin", "|x| = 1"): "asin(x)",
    ("Acos", "|x| = 1"): "acos(x)",
    ("Atanh", "|x| = 1"): "atanh(x)",
    ("Acosh", "x = 1"): "acosh(x)",
    ("Pow", "x = 0"): "pow(x, y)",
    ("Pow", "x < 0, y whole"): "pow(x, y)",
    ("Mod", "x = 2·y"): "fmod(x, y)",
    ("Max", "x = y"): "maximum(x, y)",
    ("Min", "x = y"): "minimum(x, y)",
    ("ReduceMax", "two elements are the largest"): "amax(x, 0)",
    ("ReduceMin", "two elements are the smallest"): "amin(x, 0)",
    ("Clip", "x = min, x = max"): "clamp(x, y, z)",
    ("Clip", "min > max"): "clamp(x, y, z)",
    ("ReduceLogSum", "the sum is 0"): "log(x.sum())",
    ("ReduceL1", "an element is 0"): "linalg.vector_norm(x, 1)",
    ("ReduceL2", "the norm is 0"): "linalg.vector_norm(x)",
    ("ReduceLogSumExp", "every element is −∞"): "logsumexp(x, 0)",
    ("Floor", "x is whole"): "floor(x)",
    ("Ceil", "x is whole"): "ceil(x)",
    ("Round", "x is halfway"): "round(x)",
    ("Sign", "x = 0"): "sign(x)",
    ("MaxPool", "two elements of a window are the largest"): "nn.functional.max_pool1d(x, 3)",
    ("GlobalMaxPool", "two elements of a channel are the largest"): "nn.functional.adaptive_max_pool1d(x, 1)",
    ("GridSample", "a point lies on a pixel"): "nn.functional.grid_sample(x, y, align_corners=False)",
    ("GridSample", "a point lies on the border"): (
        "nn.functional.grid_sample(x, y, padding_mode='border', align_corners=True)"
    ),
    ("LpPool", "a window is 0"): "nn.functional.lp_pool1d(x, 2, 3)",
    ("GlobalLpPool", "x = 0"): "linalg.vector_norm(x, dim=-1)",
    ("LpNormalization", "p = 1, an element is 0"): "x / linalg.vector_norm(x, 1)",
    ("TopK", "two elements are the largest"): "topk(x, 1).values",
    ("ScatterElements", "updates and data are the largest"): "x.scatter_reduce(0, y, z, 'amax')",
}

# Functions that kinks="torch" follows because they choose differently: the exporter's name, the expression for torch, and a
# row whose `torch` is the derivative of that function.
FOLLOWED: tuple[tuple[str, str, KinkRow], ...] = (
    (
        "hardtanh",
        "nn.functional.hardtanh(x, -1.0, 1.0)",
        KinkRow(
            "Clip",
            "x = min, x = max",
            ((-1.0, 1.0, -2.0, 2.0), -1.0, 1.0),
            ((1.0, 1.0, 0.0, 0.0), 1.0, 1.0),
            ((0.0, 0.0, 0.0, 0.0), None, None),
            None,
            "as flat as outside",
        ),
    ),
    (
        "relu6",
        "nn.functional.relu6(x)",
        KinkRow(
            "Clip",
            "x = 0, x = 6",
            ((0.0, 6.0, -2.0, 7.0), 0.0, 6.0),
            ((1.0, 1.0, 0.0, 0.0), 1.0, 1.0),
            ((0.0, 0.0, 0.0, 0.0), None, None),
            None,
            "as flat as outside",
        ),
    ),
    (
        "clamp.Tensor",
        "clamp(x, min=y)",
        KinkRow("Max", "x = y", (1.0, 1.0), (0.5, 0.5), (1.0, 0.0), None, "x was not changed"),
    ),
    (
        "clamp_min.Tensor",
        "clamp_min(x, y)",
        KinkRow("Max", "x = y", (1.0, 1.0), (0.5, 0.5), (1.0, 0.0), None, "x was not changed"),
    ),
    (
        "clamp_max.Tensor",
        "clamp_max(x, y)",
        KinkRow("Min", "x = y", (1.0, 1.0), (0.5, 0.5), (1.0, 0.0), None, "x was not changed"),
    ),
    (
        "max.dim",
        "max(x, 0).values",
        KinkRow(
            "ReduceMax",
            "two elements are the largest",
            ((1.0, 1.0, 0.0),),
            ((0.5, 0.5, 0.0),),
            ((1.0, 0.0, 0.0),),
            None,
            "the element whose index max returns: the first",
        ),
    ),
    (
        "min.dim",
        "min(x, 0).values",
        KinkRow(
            "ReduceMin",
            "two elements are the smallest",
            ((1.0, 1.0, 2.0),),
            ((0.5, 0.5, 0.0),),
            ((1.0, 0.0, 0.0),),
            None,
            "the element whose index min returns: the first",
        ),
    ),
    (
        "adaptive_max_pool",
        "nn.functional.adaptive_max_pool1d(x[None], 1)",
        KinkRow(
            "ReduceMax",
            "two elements are the largest",
            ((1.0, 1.0, 0.0),),
            ((0.5, 0.5, 0.0),),
            ((1.0, 0.0, 0.0),),
            None,
            "the element whose index the pooling returns: the first",
        ),
    ),
    (
        "linalg_vector_norm",
        "linalg.vector_norm(x, 3)",
        KinkRow("Pow", "x = 0", (0.0, 0.5), (inf, 0.0), (0.0, None), None, "the least subgradient of a norm that is 0"),
    ),
)

# Functions that their export does not identify: the function, the exported operator, and torch's derivative.
UNTOLD: tuple[tuple[str, str, str], ...] = (
    ("relu6, hardtanh, by the TorchScript exporter", "Clip", "0 at the ends"),
    ("max(dim), min(dim) without indices, by the TorchScript exporter", "ReduceMax, ReduceMin", "the first element"),
    ("functional.adaptive_max_pool1d, 2d to the size 1, not as a layer", "ReduceMax, named amax", "the first element"),
    ("topk of equal elements", "TopK", "any of them; TopK takes the first"),
    ("multi_margin_loss where a margin is met exactly", "Clip, named clamp_min", "0; clamp_min has 1"),
    ("std, std_mean of equal numbers", "Sqrt of a variance", "0; sqrt(var(x)) has NaN"),
    (
        "xlogy, atan2, sinc, binary_cross_entropy at their special points",
        "Where, Div, Log",
        "0 or a limit; the export has NaN",
    ),
)


def exported_function(node: NodeProto) -> str:
    """The function of torch that `node` was exported for, as aten calls it with its overload: "hardtanh", "max.dim".

    The exporter's metadata identify it. Without metadata, unambiguous names of nodes and values do. "" if nothing
    identifies it.
    """
    known = {entry.key: entry.value for entry in node.metadata_props}
    for key, pattern in _TARGETS:
        if key in known and (found := pattern.search(known[key])):
            name = found[1].removesuffix(".default")
            layers = known.get("pkg.torch.onnx.class_hierarchy", "")
            return "adaptive_max_pool" if name == "amax" and _POOLS.search(layers) else name
    return _of_names(node.name, node.output[0] if node.output else "")


@cache
def _of_names(node: str, output: str) -> str:
    if of_several := _OF_SEVERAL.fullmatch(node):
        return f"{of_several[1]}.dim"
    found = _NAMES.fullmatch(node) or _NAMES.fullmatch(output)
    return found[1] or found[2] if found else ""

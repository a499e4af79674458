"""What the strategies of windows, normalizations, attention, recurrence and the like draw."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from onnx import helper

from refgrad.backends import get_backend
from refgrad.conformance import Case, strategies
from refgrad.conformance.case import node_case
from refgrad.conformance.oracles import Directional, get_oracle
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build
from refgrad.errors import OptionError
from refgrad.protos.domains import MICROSOFT

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

SEARCH = settings(
    max_examples=2000,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
Sought = Callable[[Case], Any]


def attributes(case: Case) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in case.node.attribute}


def has(name: str, *values: Any) -> Sought:
    """The attribute is there, with one of the values where some are given."""
    return lambda case: name in attributes(case) and (not values or attributes(case)[name] in values)


def varied(name: str, plain: int) -> Sought:
    """Some number of the attribute is not the plain one."""
    return lambda case: set(attributes(case).get(name, ())) - {plain}


def without(position: int) -> Sought:
    """The optional input at the position is absent."""
    return lambda case: len(case.node.input) <= position or not case.node.input[position]


def gives(position: int) -> Sought:
    """The optional input at the position is there."""
    return lambda case: not without(position)(case)


def first(case: Case) -> np.ndarray:
    return next(iter(case.feeds.values()))


def rank(count: int) -> Sought:
    return lambda case: first(case).ndim == count


def empty(case: Case) -> bool:
    return first(case).size == 0


def opens(count: int) -> Sought:
    """The node has so many outputs."""
    return lambda case: len(case.node.output) == count


SOUGHT: dict[str, tuple[Sought, ...]] = {
    "Conv": (
        *(has("group", 2), has("group", 3), varied("dilations", 1), varied("strides", 1), varied("pads", 0)),
        *(has("auto_pad", way) for way in (b"SAME_UPPER", b"SAME_LOWER", b"VALID")),
        *(without(2), gives(2), rank(3), rank(4), rank(5), empty, has("kernel_shape")),
        lambda case: "W" not in case.feeds,
        lambda case: "kernel_shape" not in attributes(case),
    ),
    "ConvTranspose": (
        has("output_shape"),
        varied("output_padding", 0),
        has("auto_pad", b"SAME_LOWER"),
        has("group", 2),
    ),
    "Col2Im": (varied("pads", 0), varied("dilations", 1), lambda case: "image_shape" in case.feeds, rank(3)),
    "MaxPool": (has("ceil_mode", 1), has("storage_order", 1), varied("dilations", 1), opens(2), rank(5), empty),
    "AveragePool": (has("ceil_mode", 1), has("count_include_pad", 1), varied("dilations", 1), varied("pads", 0)),
    "LpPool": (has("p", 1), has("p", 3), has("ceil_mode", 1)),
    "MaxUnpool": (
        gives(2),
        without(2),
        lambda case: len(set(case.feeds.get("I", np.zeros(1)).flat)) < first(case).size,
    ),
    "BatchNormalization": (has("training_mode", 1), empty, rank(2), rank(4)),
    "LayerNormalization": (has("axis", 0), has("axis", -1), without(2), opens(3), empty),
    "LpNormalization": (has("p", 1), has("axis", 0)),
    "Attention": (
        *(rank(3), rank(4), gives(4), has("is_causal", 1), has("softcap", 1.5), opens(4), opens(3), empty),
        *(has("qk_matmul_output_mode", mode) for mode in range(4)),
        *(lambda case, kind=kind: case.feeds.get("attn_mask", first(case)[0]).dtype == kind for kind in (bool, "f4")),
    ),
    "RotaryEmbedding": (gives(3), without(3), has("interleaved", 1), has("rotary_embedding_dim"), rank(3), rank(4)),
    "TensorScatter": (has("mode", b"circular"), without(2), gives(2), has("axis", 1), empty),
    "LinearAttention": tuple(has("update_rule", r) for r in (b"linear", b"gated", b"delta", b"gated_delta")),
    "CausalConvWithState": (without(2), without(3), gives(3), has("activation", b"silu")),
    "LSTM": (
        *(has("direction", b"reverse"), has("direction", b"bidirectional"), has("layout", 1), has("clip", 0.5)),
        *(without(3), *(gives(k) for k in range(3, 8)), has("input_forget", 1), has("activation_alpha"), empty),
        lambda case: b"Softsign" in attributes(case).get("activations", ()),
    ),
    "GRU": (has("linear_before_reset", 1), has("activations"), gives(4)),
    "DFT": (has("inverse", 1), has("onesided", 1), gives(1), gives(2), lambda case: first(case).shape[-1] == 2),
    "STFT": (gives(2), without(2), without(3), has("onesided", 0), lambda case: first(case).shape[-1] == 2),
    "Resize": (
        *(gives(2), gives(3), has("axes"), has("antialias", 1), has("exclude_outside", 1), empty),
        *(has("mode", mode) for mode in (b"nearest", b"linear", b"cubic")),
        *(has("coordinate_transformation_mode", way) for way in (b"align_corners", b"tf_crop_and_resize")),
        *(has("keep_aspect_ratio_policy", policy) for policy in (b"not_larger", b"not_smaller")),
    ),
    "GridSample": (
        *(has("mode", mode) for mode in (b"linear", b"nearest", b"cubic")),
        *(has("padding_mode", way) for way in (b"border", b"reflection")),
        *(has("align_corners", 1), rank(3), rank(5), empty),
    ),
    "DeformConv": (has("offset_group", 2), has("group", 2), without(3), gives(3), gives(4), varied("dilations", 1)),
    "RoiAlign": (has("mode", b"max"), has("sampling_ratio", 2), lambda case: not case.feeds["rois"].size),
    "QuantizeLinear": (has("block_size"), has("saturate", 0), without(2), lambda case: case.feeds["s"].ndim == 0),
    "QLinearConv": (gives(8), without(8), has("group", 2), lambda case: case.feeds["sw"].ndim == 1),
    "MatMulInteger": (without(2), gives(3), lambda case: case.feeds["w"].ndim == 3),
    "com.microsoft.MultiHeadAttention": (rank(5), gives(3), gives(4), gives(5), gives(6), has("unidirectional", 1)),
    "com.microsoft.FusedConv": (gives(3), has("activation", b"Clip"), has("group", 2)),
    "ai.onnx.ml.SVMClassifier": tuple(has("kernel_type", k) for k in (b"LINEAR", b"POLY", b"RBF", b"SIGMOID")),
}


@pytest.mark.parametrize("operator", SOUGHT)
def test_every_attribute_and_optional_input_is_drawn(operator: str):
    drawn = strategies.node(operator)
    for place, sought in enumerate(SOUGHT[operator]):
        assert sought(find(drawn, sought, settings=SEARCH, random=Random(0))), place


@pytest.mark.parametrize("operator", ["com.microsoft.SkipGroupNorm", "ai.onnx.ml.ArrayFeatureExtractor", "Col2Im"])
def test_no_unknown_rank_is_drawn_where_refgrad_refuses_it(operator: str):
    with pytest.raises(OptionError, match=r"draws no unknown shapes. It has 'static', 'symbolic'"):
        strategies.node(operator, shapes="unknown")


def test_the_default_of_an_activation_is_the_number_that_an_attribute_holds():
    a, b = np.array([[-4.0]]), np.array([[1.0]])
    results = []
    for given in ({}, {"activation_alpha": 1.702}):
        case = node_case("FusedGemm", a, b, domain=MICROSOFT, opset=1, activation="QuickGelu", **given)
        results.append(get_backend("numpy").prepare(case.model).run(case.feeds)["Y"])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("window", [3, 4])
def test_stft_has_a_gradient_where_onesided_is_absent(window: int):
    rng = np.random.default_rng(0)
    signal, taps = rng.standard_normal((1, 7, 1)), rng.standard_normal(window)
    case = node_case("STFT", signal, np.array(2), taps, opset=17, constant=["frame_step"])
    problem = ask(case)
    built = build("refgrad", problem)
    feeds = problem.at | {built.cotangents[name]: cotangent for name, cotangent in problem.wide_cotangents.items()}
    results = get_backend("numpy").prepare(built.model, precision="float64").run(feeds)
    for said in get_oracle("differences").observe(problem):
        assert isinstance(said, Directional)
        assert np.vdot(results[built.gradients[said.name]], said.direction) == pytest.approx(said.value, rel=1e-7)

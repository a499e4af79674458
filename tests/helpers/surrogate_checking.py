"""A gradient through rounding is compared with differences of a surrogate, and with ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx.parser
from checking import names_of, widened
from runtime import overflows
from surrogate import Surrogate

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case
from refgrad.conformance.oracles.central import directional
from refgrad.errors import BackendError

STRAIGHT = ("straight-through", "clipped")


def assert_surrogate(case: Case, quantization: str, runtime: bool = True) -> None:
    model = refgrad.gradient(case.model, wrt=case.wrt, quantization=quantization)
    onnx.checker.check_model(model, full_check=True)
    surrogate, feeds = Surrogate(case.model, case.feeds, quantization), widened(case.feeds)
    rng = np.random.default_rng(1)
    cotangents = {name: rng.standard_normal(value.shape) for name, value in surrogate(feeds).items()}
    seeds = {name: cotangents[output] for output, name in names_of(model, "cotangents").items()}
    gradients = get_backend("numpy").prepare(model, precision="float64").run(feeds | seeds)
    for source, name in names_of(model, "gradients").items():
        got, at = gradients[name], feeds.get(source, surrogate.constants.get(source))
        assert at is not None
        assert got.shape == at.shape, f"{case} ({quantization}): {name}"
        direction = rng.standard_normal(got.shape) * np.abs(at)
        expected = directional(surrogate, feeds | {source: at}, {source: direction}, cotangents, step=1e-4)
        size = max(float(np.linalg.norm(got * at)), abs(expected.value), 1e-3)
        assert expected.error <= 1e-4 * size, f"{case}: differences of {name} do not settle: {expected}"
        assert abs(np.sum(got * direction) - expected.value) <= 1e-5 * size + expected.error, (
            f"{case} ({quantization}): {name}"
        )
    if runtime and "ort-cpu" in available() and all(array.size for array in case.feeds.values()):
        _assert_runtime(case, model, seeds, gradients)


def _assert_runtime(
    case: Case, model: onnx.ModelProto, seeds: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    """ONNX Runtime computes the same in the model's own types, where it has the operators."""
    if overflows(node.op_type for node in case.model.graph.node):
        return
    try:
        get_backend("ort-cpu").prepare(case.model).run(case.feeds)
    except BackendError:
        return
    try:
        prepared = get_backend("ort-cpu").prepare(model)
    except BackendError as error:
        if "Could not find an implementation for Cast" not in str(error):  # of int4, in 1.19
            raise
        return
    kinds = {value.name: value.dtype for value in (*prepared.inputs, *prepared.outputs)}
    got = prepared.run(dict(case.feeds) | {name: value.astype(kinds[name]) for name, value in seeds.items()})
    for name, value in expected.items():
        # The gradient of a scale is a sum in which much cancels.
        rounding = 64 * float(ml_dtypes.finfo(kinds[name]).eps) + 1e-4
        allowed = rounding * max(1.0, float(np.abs(value).max(initial=0)))
        np.testing.assert_allclose(got[name].astype(np.float64), value, rtol=0, atol=allowed, err_msg=name)

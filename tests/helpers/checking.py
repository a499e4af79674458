"""What the tests of rules share: a gradient is compared with float64 differences, never with another derivation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np
import onnx

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, is_float
from refgrad.conformance.cases import every_case
from refgrad.conformance.oracles.central import directional
from refgrad.conformance.problems.feeds import widened
from refgrad.derivatives import ortbuilder
from refgrad.errors import BackendError
from refgrad.model.graph import MIN_OPSET
from refgrad.protos.types import FLOATS
from refgrad.tables.registry import BODY, CONTROL_FLOW_RULES, RULES

SETTLED = 1e-3  # the error of differences that still tell right from wrong, relative to the gradient
STEPS = (1e-3, 1e-6)  # the second where the first crosses what is rounded
TOLERANCE = 1e-6  # of a gradient computed in float64, relative to its norm


def by_operator(accept: Callable[[Case], bool]) -> dict[tuple[str, str], list[Case]]:
    """The smooth cases that `accept` takes, by the operator (domain, name), where that has a derivative of its own."""
    found = defaultdict(list)
    for case in every_case():
        domain, _, op_type = case.operator.rpartition(".")
        key = domain, op_type
        known = key in RULES or key in CONTROL_FLOW_RULES or key in BODY
        if case.values == "smooth" and known and (domain or case.opset >= MIN_OPSET) and accept(case):
            found[key].append(case)
    return found


def cotangents_for(case: Case, outputs: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A random cotangent for every float output that is differentiated."""
    wanted = case.outputs or tuple(name for name, value in outputs.items() if is_float(value))
    return {name: rng.standard_normal(outputs[name].shape) for name in wanted}


def assert_gradient(
    case: Case,
    dialect: str = "onnx",
    tolerance: float = TOLERANCE,
    directions: int = 2,
    seed: int = 0,
    runtime: bool = True,
) -> None:
    """Fail unless the gradient agrees with central differences along random directions, input by input, in float64.

    With `runtime`, ONNX Runtime has to compute the same in the model's own types wherever it runs the model itself: dialect
    "ort" in its training build only, and up to opset 21, the last that this one knows.
    """
    rng = np.random.default_rng((seed, 1))  # not the stream of the cases' feeds: a cotangent equal to x is special
    forward = get_backend("numpy").prepare(_overridable(case.model), precision="float64")
    feeds = widened(case.feeds)
    outputs = forward.run(feeds)
    cotangents = cotangents_for(case, outputs, rng)
    model = refgrad.gradient(case.model, wrt=case.wrt, outputs=list(cotangents), dialect=dialect)
    if all(node.domain or onnx.defs.has(node.op_type) for node in model.graph.node):
        # onnx does not know the two pooling gradients, which ONNX Runtime keeps in the default domain.
        onnx.checker.check_model(model, full_check=dialect == "onnx")
    prepared = get_backend("numpy").prepare(model, precision="float64")
    seeds = {name: cotangents[output] for output, name in names_of(model, "cotangents").items()}
    gradients = prepared.run(feeds | seeds)
    for source, name in names_of(model, "gradients").items():
        gradient = gradients[name]
        point = feeds if source in feeds else feeds | {source: default(case.model, source)}
        assert gradient.shape == point[source].shape, f"{case}: {name} has shape {gradient.shape}"
        for _ in range(directions):
            direction = {source: rng.standard_normal(gradient.shape)}
            got = float(np.sum(gradient * direction[source]))
            for step in STEPS:
                expected = directional(lambda x: forward.run(x), point, direction, cotangents, step)
                size = max(float(np.linalg.norm(gradient)), abs(expected.value))
                settled = expected.error <= SETTLED * max(size, 1e-6 * max(1.0, expected.scale))
                if settled:
                    break
            assert settled, f"{case}: differences of {name} do not settle: {expected}"
            assert abs(got - expected.value) <= tolerance * size + expected.error, (
                f"{case} ({dialect}): {name} along a direction is {got}, differences give {expected}"
            )
    if runtime and "ort-cpu" in available() and (dialect == "onnx" or ortbuilder.available()):
        assert_runtime(case, model, seeds, gradients, dialect)


def assert_second_derivative(case: Case, directions: int = 2) -> None:
    """The gradient of the gradient, by what the case differentiates and by the cotangents, against its differences."""
    outputs = get_backend("numpy").prepare(case.model).run(case.feeds)
    gradient = refgrad.gradient(case.model, wrt=case.wrt, outputs=case.outputs)
    rng = np.random.default_rng(1)
    seeds = {
        name: rng.standard_normal(outputs[output].shape).astype(outputs[output].dtype)
        for output, name in names_of(gradient, "cotangents").items()
    }
    wrt = case.wrt or tuple(name for name, value in case.feeds.items() if is_float(value))
    again = Case(f"the gradient of {case}", gradient, {**case.feeds, **seeds}, (*wrt, *seeds))
    assert_gradient(again, directions=directions, runtime=False)


def assert_runtime(
    case: Case,
    model: onnx.ModelProto,
    seeds: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    dialect: str = "onnx",
    backend: str = "ort-cpu",
    roundings: int = 32,
) -> None:
    """Fail unless a backend of ONNX Runtime computes the gradients up to so many roundings, or refuses the model, too."""
    try:
        prepared = get_backend(backend).prepare(model)
        kinds = {value.name: value.dtype for value in (*prepared.inputs, *prepared.outputs)}
        feeds = dict(case.feeds) | {name: value.astype(kinds[name]) for name, value in seeds.items()}
        results = prepared.run(feeds)
    except BackendError as error:
        try:
            get_backend(backend).prepare(case.model).run(case.feeds)
        except BackendError:
            return  # it does not run the model itself
        raise AssertionError(f"{case} ({dialect}): {backend} runs the model, not its gradient: {error}") from error
    for name, got in results.items():
        # The cotangents were rounded, then each of a few operations, each once.
        allowed = (
            roundings * float(ml_dtypes.finfo(kinds[name]).eps) * max(1.0, float(np.abs(expected[name]).max(initial=0)))
        )
        np.testing.assert_allclose(
            got.astype(np.float64),
            expected[name],
            rtol=0,
            atol=allowed,
            err_msg=f"{case} ({dialect}): {name} on {backend}",
        )


def _overridable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every float initializer listed as an input too, so that another value can be fed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = max(copy.ir_version, 4)
    listed = {value.name for value in copy.graph.input}
    copy.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in copy.graph.initializer
        if tensor.data_type in FLOATS and tensor.name not in listed
    )
    return copy


def names_of(model: onnx.ModelProto, kind: str) -> dict[str, str]:
    """The "gradients" or the "cotangents" of a gradient model: what each belongs to, and its name."""
    [text] = [entry.value for entry in model.metadata_props if entry.key == f"refgrad.{kind}"]
    return dict(json.loads(text))


def default(model: onnx.ModelProto, name: str) -> np.ndarray:
    """The value of an initializer, in float64."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    return onnx.numpy_helper.to_array(tensor).astype(np.float64)

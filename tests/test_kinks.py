"""Every row of the table of kinks, against refgrad, torch and ONNX Runtime's builder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.cases.kinks import at
from refgrad.tables.kinks import CONVENTIONS, KINKS, Kink, Point
from refgrad.tables.missing import MISSING
from refgrad.transforms import ortbuilder

pytestmark = pytest.mark.torch


def case(kink: Kink, dtype: type = np.float64) -> Case:
    return at(kink, dtype)


def gradients(model: onnx.ModelProto, kink: Kink, backend: str, dtype: type) -> dict[str, np.ndarray]:
    prepared = get_backend(backend).prepare(model)
    feeds = dict(case(kink, dtype).feeds)
    forward = get_backend("numpy").prepare(case(kink, dtype).model).run(feeds)
    feeds |= {f"{name}_grad": np.ones_like(value) for name, value in forward.items()}
    return prepared.run({value.name: feeds[value.name] for value in prepared.inputs})


def expect(got: dict[str, np.ndarray], kink: Kink, expected: Point) -> None:
    for name, value in zip(case(kink).feeds, expected, strict=True):
        if value is not None:
            np.testing.assert_allclose(
                got[f"{name}_grad"], np.array(value), rtol=1e-6, err_msg=f"{kink.operator} {name}"
            )


@pytest.mark.parametrize("kink", KINKS, ids=lambda k: f"{k.operator}: {k.where}")
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_ours(kink: Kink, dialect: str) -> None:
    model = refgrad.gradient(case(kink).model, dialect=dialect)
    expect(gradients(model, kink, "numpy", np.float64), kink, kink.ours)
    if (
        "ort-cpu" in available()
        and (dialect == "onnx" or ortbuilder.available())
        and runs_right(case(kink, np.float32))
    ):
        narrow = refgrad.gradient(case(kink, np.float32).model, dialect=dialect)
        expect(gradients(narrow, kink, "ort-cpu", np.float32), kink, kink.ours)


@pytest.mark.parametrize("kink", KINKS, ids=lambda k: f"{k.operator}: {k.where}")
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("convention", CONVENTIONS[1:])
def test_the_convention_that_is_asked_for(kink: Kink, dialect: str, convention: str) -> None:
    model = refgrad.gradient(case(kink).model, dialect=dialect, kinks=convention)
    expect(gradients(model, kink, "numpy", np.float64), kink, kink.choice(convention))


def test_a_constant_exponent_of_zero() -> None:
    made = node_case("Pow", np.zeros(1), np.array(0.0), constant=("Y",), wrt=("X",))
    for convention, expected in (("refgrad", 0.0), ("torch", 0.0), ("onnxruntime", np.nan)):
        model = refgrad.gradient(made.model, wrt=["X"], kinks=convention)
        got = get_backend("numpy").prepare(model).run({"X": np.zeros(1), "Z_grad": np.ones(1)})["X_grad"]
        np.testing.assert_array_equal(got, [expected])


def runs_right(made: Case) -> bool:
    """Whether ONNX Runtime gets the function itself right: 1.19.2 has NaN for ReduceLogSumExp of −∞."""
    results = [get_backend(name).prepare(made.model).run(made.feeds) for name in ("numpy", "ort-cpu")]
    return all(np.array_equal(results[0][name], results[1][name], equal_nan=True) for name in results[0])


@pytest.mark.parametrize("kink", [k for k in KINKS if k.ort is not None], ids=lambda k: f"{k.operator}: {k.where}")
@pytest.mark.skipif(not ortbuilder.available(), reason="needs ONNX Runtime's gradient builder")
def test_onnx_runtime(kink: Kink) -> None:
    assert kink.ort is not None
    made = case(kink, np.float32)
    wrt = [name for name, value in zip(made.feeds, kink.ort, strict=True) if value is not None]
    output = made.model.graph.output[0].name
    expect(gradients(ortbuilder.build_raw(made.model, wrt, output), kink, "ort-cpu", np.float32), kink, kink.ort)


@pytest.mark.parametrize("kink", [k for k in KINKS if k.torch is not None], ids=lambda k: f"{k.operator}: {k.where}")
def test_torch(kink: Kink) -> None:
    torch = pytest.importorskip("torch")
    assert kink.torch is not None
    inputs = [torch.from_numpy(x) for x in case(kink).feeds.values()]
    for tensor in inputs:
        tensor.requires_grad_(tensor.is_floating_point())
    functional(torch, kink)(*inputs).sum().backward()
    for tensor, expected in zip(inputs, kink.torch, strict=True):
        if expected is None:
            continue
        np.testing.assert_allclose(tensor.grad.numpy(), np.array(expected), rtol=1e-6)


def functional(torch: Any, kink: Kink) -> Callable[..., Any]:
    """torch's function of the same meaning."""
    alpha = kink.attributes.get("alpha")
    functions = torch.nn.functional
    return {
        "Relu": torch.relu,
        "LeakyRelu": lambda x: functions.leaky_relu(x, alpha),
        "PRelu": lambda x, slope: functions.prelu(x.reshape(1), slope.reshape(1)),
        "Elu": lambda x: functions.elu(x, alpha),
        "Selu": functions.selu,
        "ThresholdedRelu": lambda x: functions.threshold(x, alpha, 0.0),
        "Shrink": lambda x: functions.softshrink(x, kink.attributes["lambd"]),
        "HardSigmoid": lambda x: functions.hardsigmoid(1.5 * x),
        "HardSwish": functions.hardswish,
        "Pow": torch.pow,
        "Mod": torch.fmod,
        "Max": torch.maximum,
        "Min": torch.minimum,
        "ReduceMax": lambda x: torch.amax(x, 0),
        "ReduceMin": lambda x: torch.amin(x, 0),
        "Clip": torch.clamp,
        "ReduceL1": lambda x: torch.linalg.vector_norm(x, 1),
        "ReduceL2": torch.linalg.vector_norm,
        "ReduceLogSum": lambda x: torch.log(x.sum()),
        "ReduceLogSumExp": lambda x: torch.logsumexp(x, 0),
        "GridSample": lambda x, grid: functions.grid_sample(
            x,
            grid,
            padding_mode=kink.attributes.get("padding_mode", "zeros"),
            align_corners=bool(kink.attributes.get("align_corners")),
        ),
        "MaxPool": lambda x: functions.max_pool1d(x, 3),
        "GlobalMaxPool": lambda x: functions.adaptive_max_pool1d(x, 1),
        "LpPool": lambda x: functions.lp_pool1d(x, 2, 3),
        "GlobalLpPool": lambda x: torch.linalg.vector_norm(x, 2, dim=-1),
        "LpNormalization": lambda x: x / torch.linalg.vector_norm(x, 1),
        "TopK": lambda x, k: torch.topk(x, int(k)).values,
        "ScatterElements": lambda x, indices, updates: x.scatter_reduce(0, indices, updates, "amax"),
    }.get(kink.operator) or getattr(torch, kink.operator.lower())


def test_torch_disagrees_only_where_the_reason_says_so() -> None:
    assert {k.operator for k in KINKS if not k.agreed} == {"Pow", "ReduceLogSumExp"}


@pytest.mark.parametrize("row", MISSING, ids=lambda row: row.operator)
@pytest.mark.parametrize("dialect", ["onnx", "ort"])
def test_ours_where_a_number_is_missing(row: Kink, dialect: str) -> None:
    test_ours(replace(row, ours=row.choice("onnxruntime")) if dialect == "ort" else row, dialect)


@pytest.mark.parametrize("row", [row for row in MISSING if row.torch is not None], ids=lambda row: row.operator)
def test_torch_where_a_number_is_missing(row: Kink) -> None:
    test_torch(row)

"""A recording of a torch module's gradients: values and gradients of its parameters and inputs, its outputs, the cotangents."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from refgrad.errors import OptionError, choices, of_type, raised


def record(
    module: Any,
    inputs: Mapping[str, Any] | Sequence[Any],
    *,
    model: ModelProto | None = None,
    cotangents: Sequence[Any] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Run a torch module forward and backward, and return what `compare` takes as a side.

    Each parameter, buffer and input has its value under its name, and under `<name>_grad` its gradient, if the outputs depend
    on it; each output is there with its cotangent, `<output>_grad`.

    :param inputs: tensors by the names of the arguments, or in their order. Those with floats are differentiated by.
    :param model: the export; inputs and outputs are called as in it, by their order.
    :param cotangents: one for each output with floats; by default random numbers of `seed`.
    :raises OptionError: torch is not installed, or the module returns something else than tensors.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise OptionError("Recording a module needs a package: pip install torch.") from error
    names = list(inputs) if isinstance(inputs, Mapping) else [f"input_{k}" for k in range(len(inputs))]
    given = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
    if odd := [name for name, value in zip(names, given, strict=True) if not isinstance(value, torch.Tensor)]:
        raise OptionError(f"Expected tensors, got other values for the inputs {choices(odd)}.")
    leaves = [
        value.detach().clone().requires_grad_(True) if torch.is_floating_point(value) else value for value in given
    ]
    module.zero_grad()
    named = dict(zip(names, leaves, strict=True)) if isinstance(inputs, Mapping) else {}
    try:
        made = module(**named) if named else module(*leaves)
    except Exception as error:
        raise OptionError(f"The module raised {raised(error)}.") from error
    outputs = list(_tensors(made, torch))
    if not outputs:
        raise OptionError(f"Expected tensors, got {of_type(made)} from the module.")
    if model is not None:
        declared = [value.name for value in model.graph.input]
        names = declared[: len(names)] if len(declared) >= len(names) and not set(names) <= set(declared) else names
    titles = [f"output_{k}" for k in range(len(outputs))] if len(outputs) > 1 else ["output"]
    if model is not None and len(model.graph.output) == len(outputs):
        titles = [value.name for value in model.graph.output]
    rng = np.random.default_rng([seed, 0])
    floats = [k for k, one in enumerate(outputs) if torch.is_floating_point(one) and one.requires_grad]
    if not floats:
        raise OptionError(
            "No output of the module has a gradient: all are integers, or detached from parameters and inputs."
        )
    weights = {}
    for place, k in enumerate(floats):
        drawn = rng.standard_normal(tuple(outputs[k].shape)) if cotangents is None else _array(cotangents[place])
        weights[k] = torch.as_tensor(np.asarray(drawn)).to(outputs[k])
    torch.autograd.backward([outputs[k] for k in floats], [weights[k] for k in floats])
    found: dict[str, np.ndarray] = {}
    for name, value in (*module.named_parameters(), *zip(names, leaves, strict=True)):
        found[name] = _array(value)
        if getattr(value, "grad", None) is not None:
            found[f"{name}_grad"] = _array(value.grad)
    found |= {name: _array(value) for name, value in module.named_buffers()}
    for k, (title, value) in enumerate(zip(titles, outputs, strict=True)):
        found[title] = _array(value)
        if k in weights:
            found[f"{title}_grad"] = _array(weights[k])
    return found


def _tensors(made: Any, torch: Any) -> list[Any]:
    if isinstance(made, torch.Tensor):
        return [made]
    values = made.values() if isinstance(made, Mapping) else made if isinstance(made, list | tuple) else ()
    return [one for value in values for one in _tensors(value, torch)]


def _array(value: Any) -> np.ndarray:
    if not hasattr(value, "detach"):
        return np.asarray(value)
    held = value.detach().cpu()
    return np.asarray(held.float().numpy() if str(held.dtype) == "torch.bfloat16" else held.numpy())


def recorded_by(function: Callable[[], Any], model: ModelProto | None, seed: int) -> dict[str, np.ndarray]:
    """The recording of what a function returns: a module and its inputs.

    :raises OptionError: it returns something else.
    """
    try:
        made = function()
    except Exception as error:
        raise OptionError(f"The function raised {raised(error)}.") from error
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[0], "named_parameters")):
        raise OptionError(
            f"The function returned {of_type(made)}. Return (module, inputs): a torch.nn.Module and its inputs."
        )
    module, inputs = made
    if not isinstance(inputs, Mapping | list | tuple):
        inputs = (inputs,)
    return record(module, inputs, model=model, seed=seed)

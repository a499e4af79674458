"""How each runtime is called. A function takes the path of a model, and the names of its inputs and outputs in their order.

It returns a function that takes the arrays of the inputs and returns the arrays of the outputs. An error that says that
something is not supported means just that; every other one is a crash.

A runtime of yours is one function, in a module of the current folder or an installed one: `python run.py mine:load FOLDER`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[list[np.ndarray]], list[Any]]
Runtime = Callable[[Path, list[str], list[str]], Run]


def of_type(array: np.ndarray, dtype: str) -> np.ndarray:
    """The array of a .npy file in its own type: one that NumPy does not have, such as bfloat16, is stored as its bits.

    :raises NotImplementedError: the type is not supported without the package ml_dtypes.
    :raises ValueError: the file has another type.
    """
    if array.dtype.name == dtype:
        return array
    try:
        import ml_dtypes  # onnx brings it
    except ImportError as error:
        raise NotImplementedError(f"{dtype} is not supported by this program without the package ml_dtypes") from error
    if not hasattr(ml_dtypes, dtype) or array.dtype.kind != "u":
        raise ValueError(f"the file has the type {array.dtype} instead of {dtype}")
    return array.view(getattr(ml_dtypes, dtype))


def onnx_reference(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """The evaluator of the onnx package."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(path))
    return lambda arrays: list(evaluator.run(outputs, dict(zip(inputs, arrays, strict=True))))


def onnxruntime(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """ONNX Runtime on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(arrays: list[np.ndarray]) -> list[Any]:
        feeds = {name: _to_ort(array) for name, array in zip(inputs, arrays, strict=True)}
        return [_from_ort(value) for value in session.run_with_ort_values(outputs, feeds)]

    return run


def _to_ort(array: np.ndarray) -> Any:
    from onnxruntime import OrtValue

    if array.dtype.type.__module__ == "numpy":
        return OrtValue.ortvalue_from_numpy(array)
    kinds = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20}
    if array.dtype.name not in kinds:
        raise NotImplementedError(f"{array.dtype} is not supported by this program")
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array, kinds[array.dtype.name])


def _from_ort(value: Any) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        array: np.ndarray = value.numpy()
        return array
    import ctypes

    count = int(np.prod(value.shape()))
    bits = (ctypes.c_uint16 * count).from_address(value.data_ptr()) if count else ()
    return of_type(np.array(bits, np.uint16).reshape(value.shape()), "bfloat16")


def tract(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """tract, which is written in Rust; its Python package holds the library."""
    import tract as library

    model = library.onnx().load(path)
    order = [model.output_name(k) for k in range(model.output_count())]
    runnable = model.into_model().into_runnable()
    places = [order.index(name) for name in outputs] if set(outputs) <= set(order) else list(range(len(outputs)))

    def run(arrays: list[np.ndarray]) -> list[Any]:
        results = runnable.run(arrays)
        return [results[place].to_numpy() for place in places]

    return run


def tinygrad(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """tinygrad's runner of ONNX models."""
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    runner = OnnxRunner(path)

    def run(arrays: list[np.ndarray]) -> list[Any]:
        results = runner({name: Tensor(array) for name, array in zip(inputs, arrays, strict=True)})
        return [results[name].numpy() for name in outputs]

    return run


def onnx2torch(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """The torch module that onnx2torch makes of a model."""
    import onnx
    import torch

    try:
        import torchvision  # noqa: F401  (onnx2torch needs it for two operators)
    except RuntimeError:  # it was built for another torch than the one for the CPU
        _without_torchvision()
    from onnx2torch import convert

    model = onnx.load(path, load_external_data=False)
    module = convert(model)
    places = [[value.name for value in model.graph.output].index(name) for name in outputs]

    def run(arrays: list[np.ndarray]) -> list[Any]:
        with torch.no_grad():
            results = module(*map(torch.from_numpy, arrays))
        results = results if isinstance(results, tuple | list) else [results]
        return [results[place].numpy() for place in places]

    return run


def _without_torchvision() -> None:
    """Let onnx2torch be imported without torchvision: its NonMaxSuppression and RoiAlign are not supported then."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]

    def missing(*arguments: Any) -> None:
        raise NotImplementedError("torchvision does not load, and is not supported by this program without it")

    whole, ops = types.ModuleType("torchvision"), types.ModuleType("torchvision.ops")
    whole.ops, ops.nms, ops.roi_align = ops, missing, missing  # type: ignore[attr-defined]
    sys.modules |= {"torchvision": whole, "torchvision.ops": ops}


def jaxonnxruntime(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """The jax function that jaxonnxruntime makes of a model."""
    import jax
    import onnx
    from jaxonnxruntime import config
    from jaxonnxruntime.backend import Backend

    jax.config.update("jax_enable_x64", True)
    config.update("jaxort_only_allow_initializers_as_static_args", False)
    model = onnx.load(path, load_external_data=False)
    prepared = Backend.prepare(model)
    places = [[value.name for value in model.graph.output].index(name) for name in outputs]

    def run(arrays: list[np.ndarray]) -> list[Any]:
        results = list(prepared.run(arrays))
        return [np.asarray(results[place]) for place in places]

    return run


def openvino(path: Path, inputs: list[str], outputs: list[str]) -> Run:
    """OpenVINO on the CPU, which is told to compute in float32."""
    import openvino as ov
    from openvino import properties

    core = ov.Core()
    compiled = core.compile_model(
        core.read_model(path), "CPU", {properties.hint.execution_mode: properties.hint.ExecutionMode.ACCURACY}
    )

    kept = {name for port in compiled.inputs for name in port.get_names()}  # it forgets inputs that no node reads

    def run(arrays: list[np.ndarray]) -> list[Any]:
        results = compiled({name: array for name, array in zip(inputs, arrays, strict=True) if name in kept})
        return [results[name] for name in outputs]

    return run


RUNTIMES: dict[str, Runtime] = {  # by the name of the module that is imported
    "jaxonnxruntime": jaxonnxruntime,
    "onnx.reference": onnx_reference,
    "onnx2torch": onnx2torch,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "tinygrad": tinygrad,
    "tract": tract,
}


def get(name: str) -> Runtime:
    """The function of a runtime: one of RUNTIMES, or `MODULE:FUNCTION`. The current folder is looked at first for the module.

    :raises ImportError: it is not installed, or there is no such module or function.
    :raises ValueError: the name is neither.
    """
    if name in RUNTIMES:
        if importlib.util.find_spec(_top(name)) is None:
            raise ImportError(f"{name} is not installed")
        return RUNTIMES[name]
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        listed = ", ".join(RUNTIMES)
        raise ValueError(
            f"there is no runtime {name!r}: give one of {listed}, or a function of yours as MODULE:FUNCTION"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(1, os.getcwd())  # behind the folder of this file
    found = getattr(importlib.import_module(module), function, None)
    if not callable(found):
        raise ImportError(f"the module {module} has no function {function}")
    runtime: Runtime = found
    return runtime


def version(name: str) -> str:
    """The version of a runtime: of the distribution that installed its module, else its `__version__`, else ""."""
    top = _top(name)
    distributions = metadata.packages_distributions().get(top, [])
    if distributions:
        return metadata.version(distributions[0])
    return str(getattr(sys.modules.get(top), "__version__", ""))


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]

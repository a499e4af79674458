"""Programs that show a failure again.

A program is parts that are the same for every model, and one literal. Everything else lies in files beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from refgrad.conformance.locating.sides import PRECISIONS
from refgrad.escaping import python


def running(side: str, of_builder: bool) -> str:
    """Return a program that runs model.onnx with the inputs beside it, and compares with the outputs beside it.

    :param side: builder@executor.
    :param of_builder: the fault is the builder's. Then any executor shows it.
    """
    executor = side.partition("@")[2]
    for precision in PRECISIONS:
        executor = executor.removesuffix(f":{precision}")
    asked = ""
    runner = _REFERENCE if of_builder else _RUNNERS.get(executor, "")
    if not runner and ":" in executor:
        module, _, attribute = executor.partition(":")
        asked, runner = _asked(module=module, executor=attribute), _OF_A_CLASS
    return "".join((_TO_RUN, _BEGINNING, _TENSORS, asked, runner or _REFERENCE, _COMPARED))


def building(side: str, wrt: Sequence[str], outputs: Sequence[str]) -> str:
    """Return a program that asks a builder for the gradient of model.onnx, at which the builder fails or dies.

    :param side: builder@executor.
    """
    builder = side.partition("@")[0]
    if builder.startswith("onnxruntime:"):
        asked, call = _asked(wrt=list(wrt), outputs=list(outputs), builder=builder), _OF_ONNXRUNTIME
    elif builder in _BUILDERS:
        asked, call = _asked(wrt=list(wrt), outputs=list(outputs)), _BUILDERS[builder]
    else:
        module, _, function = builder.partition(":")
        asked = _asked(wrt=list(wrt), outputs=list(outputs), module=module, builder=function)
        call = _OF_A_FUNCTION
    return "".join((_TO_BUILD, _BEGINNING, asked, call, _TOLD))


def rebuilding(side: str, wrt: Sequence[str], outputs: Sequence[str]) -> str:
    """Return a program that asks a builder for the gradient of forward.onnx again, and compares; "" if it cannot be asked.

    :param side: builder@executor.
    """
    builder = side.partition("@")[0]
    if builder in _BUILDERS:
        asked, call = _asked(wrt=list(wrt), outputs=list(outputs)), _BUILDERS[builder]
    elif ":" in builder and not builder.startswith("onnxruntime:"):
        module, _, function = builder.partition(":")
        asked = _asked(wrt=list(wrt), outputs=list(outputs), module=module, builder=function)
        call = _OF_A_FUNCTION
    else:
        return ""
    names = _TENSORS.replace("outputs = list(due)", "names = list(due)")
    return "".join(
        (_TO_REBUILD, _BEGINNING, names, asked, call.replace("model.onnx", "forward.onnx"), _REBUILT, _COMPARED)
    )


def _asked(**values: object) -> str:
    """The line with all data of a program."""
    return f"asked = {python(values)}\n"


# The parts of the programs. None of them is filled in. An error may have names of the model in it, so characters that a
# terminal obeys are replaced before it is printed.

_TO_RUN = '"""Run model.onnx with the inputs of test_data_set_0, and compare with the expected outputs."""\n'
_TO_BUILD = '"""Ask a builder for the gradient of model.onnx, as it was asked when it failed."""\n'
_TO_REBUILD = '"""Ask a builder for the gradient of forward.onnx, run it, and compare with the expected outputs."""\n'
_BEGINNING = r"""
import os
import sys
import traceback
from pathlib import Path


def show(*error):
    text = "".join(traceback.format_exception(*error))
    print("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text), end="", file=sys.stderr)


sys.excepthook = show
os.chdir(Path(__file__).parent)
"""
_TENSORS = """
import numpy as np
import onnx
from onnx import numpy_helper

data = Path("test_data_set_0")


def read(kind):
    tensors = [onnx.load_tensor(path) for path in sorted(data.glob(f"{kind}_*.pb"))]
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in tensors}


feeds, due = read("input"), read("output")
outputs = list(due)
model = onnx.load("model.onnx")
"""
_COMPARED = """
actual, failed = read("actual"), False
for name, value in zip(outputs, map(np.asarray, found)):
    print(ascii(name), "expected:", due[name].ravel()[:8], "found:", value.ravel()[:8])
    if value.shape != due[name].shape:
        print("shape:", value.shape, "instead of", due[name].shape)
        failed = True
        continue
    if value.dtype.kind not in "fiub":
        failed |= not np.array_equal(value, due[name])
        continue
    with np.errstate(all="ignore"):
        errors = [np.abs(one.astype(float) - due[name].astype(float)) for one in (value, actual.get(name, value))]
    errors = [np.where(np.isnan(one), np.inf, one).max(initial=0.0) for one in errors]
    print("largest error:", errors[0], "when it was reported:", errors[1])
    failed |= bool(errors[0] > errors[1] / 2 or 0 < errors[0] == errors[1])  # both may be infinite
print("The fault is still there." if failed else "The fault is gone.")
sys.exit(int(failed))
"""
_TOLD = """
print("it made", ascii([value.name for value in made.graph.output] if hasattr(made, "graph") else made))
"""

_REBUILT = """
from onnx.reference import ReferenceEvaluator

outputs = names
found = ReferenceEvaluator(made).run(outputs, feeds)
"""

_REFERENCE = """from onnx.reference import ReferenceEvaluator

found = ReferenceEvaluator("model.onnx").run(outputs, feeds)
"""
_SESSION = """import onnxruntime

options = onnxruntime.SessionOptions()
options.log_severity_level = 4  # its messages have names of the model in them
session = onnxruntime.InferenceSession("model.onnx", options, providers=providers)
found = session.run(outputs, feeds)
"""
_RUNNERS = {
    "ort-cpu": f'providers = ["CPUExecutionProvider"]\n{_SESSION}',
    "ort-cuda": f'providers = [("CUDAExecutionProvider", {{"use_tf32": "0"}})]\n{_SESSION}',
    "onnx.reference": _REFERENCE,
}
_OF_A_CLASS = """from importlib import import_module
from operator import attrgetter

module = import_module(asked["module"])  # its folder has to be on PYTHONPATH
results = attrgetter(asked["executor"])(module)().prepare(model).run(feeds)
found = [results[name] for name in outputs]
"""

_BUILDERS = {
    "refgrad": """import refgrad

made = refgrad.gradient("model.onnx", asked["wrt"], asked["outputs"])
""",
    "refgrad:ort": """import refgrad

made = refgrad.gradient("model.onnx", asked["wrt"], asked["outputs"], dialect="ort")
""",
    "onnx-ad": """import onnx
import onnx_ad

made = onnx_ad.reverse(onnx.load("model.onnx"), asked["wrt"], asked["outputs"], layout="onnx")
""",
}
_OF_ONNXRUNTIME = """import onnx

from refgrad.conformance import bisect
from refgrad.conformance.locating.recordings import read_recording

made = bisect(onnx.load("model.onnx"), read_recording("test_data_set_0").gradients, asked["builder"]).faults
"""  # it takes more than a line to call
_OF_A_FUNCTION = """from importlib import import_module
from operator import attrgetter

import onnx

module = import_module(asked["module"])  # its folder has to be on PYTHONPATH
made = attrgetter(asked["builder"])(module)(onnx.load("model.onnx"), asked["wrt"], asked["outputs"])
"""

"""Programs that show a failure again, with the model and its inputs in them: one file is enough to see the fault.

A program is parts that are the same for every model, and one literal of Python with all data. What is too large for a text is
JSON in a file beside it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from refgrad.backends.onnxruntime import DISTRIBUTIONS
from refgrad.conformance.locating.sides import INTERPRETER, PRECISIONS
from refgrad.conformance.locating.values import is_text, kind_of
from refgrad.conformance.problems.point import with_defaults
from refgrad.errors import RefgradError
from refgrad.escaping import python
from refgrad.model import native
from refgrad.model.external import array_of
from refgrad.protos.traverse import every_node, graphs, tensors_without_initializers

DATA = "reproduce.json"  # the file with the data that is too large for the program
_LONGEST = 40_000  # characters of a program: GitHub takes 65,536 of an issue
_LISTED = 64  # numbers of a tensor, after which they are packed
_SAY_NOTHING = ("Exception", "RuntimeError")  # classes of exceptions
_WORDS = 14  # of the message of such a class; ONNX Runtime's begin with six that are always the same
_WIDTH = 100  # characters of a line of packed data
_PLAIN = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)


@dataclass(frozen=True)
class Shown:
    """A failure for a program to show: a model, what it is fed, and what should come.

    :param builder: who makes the gradient; "" if the fault is the executor's.
    :param executor: what runs the model, or its gradient, without a precision.
    :param is_rule: the fault is the builder's, and `model` is what it differentiates: then `expected` are the gradients by the
        names in `wrt`. Else the fault is the executor's, and `expected` are the results of `model`.
    :param is_made: the builder makes a gradient, which is wrong; else it refuses or dies.
    :param may_end: the process may end.
    :param errors: the largest error of each result that is wrong, as it was seen.
    :param raises: the class of the exception that is the failure, and the beginning of its message; nothing for a wrong result.
    """

    builder: str
    executor: str
    is_rule: bool
    is_made: bool
    may_end: bool
    model: ModelProto
    feeds: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    errors: Mapping[str, float]
    wrt: Sequence[str] = ()
    cotangents: Mapping[str, np.ndarray] = field(default_factory=dict)
    raises: tuple[str, str] | None = None


def executor_of(side: str) -> str:
    """The executor of builder@executor:precision."""
    name = side.partition("@")[2]
    for precision in PRECISIONS:
        name = name.removesuffix(f":{precision}")
    return name


def of_error(shown: Shown, printed: str) -> Shown:
    """The failure with the exception that its program printed. Without one, the process ended.

    The message counts only where the class says nothing, as ONNX Runtime's do.
    """
    told = printed.rpartition("Traceback (most recent call last):\n")[2].split("\n")
    line = next((line for line in told if line and not line.startswith(" ")), "")
    name, _, message = line.partition(": ")
    if not told[0].startswith(" "):
        return replace(shown, raises=None)
    says_nothing = name in _SAY_NOTHING or name.startswith("onnxruntime.")
    words = " ".join(message.split()[:_WORDS]) if says_nothing else ""
    return replace(shown, raises=(name.rpartition(".")[2], words), may_end=False)


def is_callable(builder: str) -> bool:
    """True if a program can ask this builder: it has a name, and is no object of a session."""
    return builder in _BUILDERS or ":" in builder


def packages(shown: Shown) -> tuple[str, ...]:
    """The packages that a program needs besides onnx and NumPy."""
    found = [name for name in ("refgrad", "onnx-ad") if shown.is_rule and shown.builder.startswith(name)]
    if shown.is_rule and shown.builder.startswith("onnxruntime:"):
        found += ["refgrad", "onnxruntime-training-cpu", "onnxruntime-training"]
    elif shown.is_made and shown.executor.startswith("ort-"):
        found += DISTRIBUTIONS
    elif shown.is_made and shown.executor == INTERPRETER:
        found.append("refgrad")
    return tuple(dict.fromkeys(found))


def program(shown: Shown) -> tuple[str, str]:
    """Return a program that shows the failure, and the JSON beside it, "" where the program has everything in itself.

    It prints what is expected and what it gets. It exits with 1 as long as the fault is there, with 0 once it is gone, and with
    2 if it cannot run, as without a package, or fails with another error.
    """
    data, of_model = _data(shown)
    parts = [_FORKED if shown.may_end else "", of_model, *_steps(shown, data)]
    is_packed = of_model == _PACKED or any(isinstance(one[2], str) for one in _tensors(data))
    head, tail = f"{_purpose(shown)}{_BEGINNING}", "".join((_UNPACKED if is_packed else "", *parts))
    text = f"{head}asked = {_literal(data)}\n{tail}"
    if len(text) <= _LONGEST:
        return text, ""
    return f"{head}{_READ}{tail}", json.dumps(data) + "\n"


def _purpose(shown: Shown) -> str:
    if not shown.is_rule:
        return _TO_RUN
    return _TO_COMPARE if shown.is_made else _TO_BUILD


def _steps(shown: Shown, data: dict[str, Any]) -> list[str]:
    """The parts after the data: how the model is run or differentiated, and how the results are compared."""
    builder = shown.builder
    if shown.is_rule and builder.startswith("onnxruntime:"):
        data["builder"] = builder
        return [_OF_ONNXRUNTIME]
    if not shown.is_rule or not is_callable(shown.builder):
        return [_runner(shown.executor, data, shown.is_rule), _RUN, _COMPARED]
    if builder in _BUILDERS:
        call = _BUILDERS[builder]
    else:
        data["module"], _, data["builder"] = builder.partition(":")
        call = _OF_A_FUNCTION
    if not shown.is_made:
        return [call, _TOLD if builder.startswith("refgrad") else _CHECKED]
    rest = _OF_ONNX_AD if builder == "onnx-ad" else _BY_NAMES
    return [_runner(shown.executor, data, True), call, rest, _COMPARED]


def _runner(executor: str, data: dict[str, Any], of_builder: bool) -> str:
    """The part that runs a model. The fault of a builder shows on most executors."""
    if executor in RUNNERS:
        return RUNNERS[executor]
    if of_builder or ":" not in executor:
        return RUNNERS["onnx.reference"]
    data["module"], _, data["executor"] = executor.partition(":")
    return _OF_A_CLASS


# The data


def _tensors(data: Mapping[str, Any]) -> list[list[Any]]:
    return [one for kind in ("inputs", "cotangents", "expected") for one in data.get(kind, {}).values()]


def _data(shown: Shown) -> tuple[dict[str, Any], str]:
    """The data of the program, and the part of it that reads the model."""
    model, feeds = shown.model, dict(shown.feeds)
    if shown.is_rule and shown.builder == "onnx-ad":
        model, weights = _as_inputs(model, shown.wrt)
        feeds |= weights
    model = _bare(model)
    text = _exact_text(model)
    data: dict[str, Any] = {"model": text or _packed_lines(model)}
    if shown.raises is not None:
        data["raises"] = shown.raises
    data["inputs"] = {name: _numbers(value) for name, value in feeds.items()}
    if shown.is_rule:
        data["wrt"], data["outputs"] = list(shown.wrt), list(shown.cotangents)
        if shown.is_made:
            data["cotangents"] = {name: _numbers(value) for name, value in shown.cotangents.items()}
    if shown.is_made or not shown.is_rule:
        data["expected"] = {name: _numbers(value) for name, value in shown.expected.items()}
        data["errors"] = {name: _number(float(error)) for name, error in shown.errors.items()}
    return data, _TEXT if text else _PACKED


def _as_inputs(model: ModelProto, names: Sequence[str]) -> tuple[ModelProto, dict[str, np.ndarray]]:
    """The model with the initializers among `names` as inputs without a value, and their values."""
    made = ModelProto()
    made.CopyFrom(with_defaults(model, names))
    held = [tensor for tensor in made.graph.initializer if tensor.name in names]
    for tensor in held:
        made.graph.initializer.remove(tensor)
    return made, {tensor.name: array_of(tensor) for tensor in held}


def _bare(model: ModelProto) -> ModelProto:
    """A copy without remarks: documentation, metadata, who wrote it."""
    made = ModelProto()
    made.CopyFrom(model)
    made.ClearField("producer_name")
    made.ClearField("producer_version")
    made.ClearField("domain")
    made.ClearField("model_version")
    made.ClearField("doc_string")
    del made.metadata_props[:]
    for graph in graphs(made.graph):
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
            part.ClearField("doc_string")
            part.ClearField("metadata_props")
    return made


def _exact_text(model: ModelProto) -> list[str]:
    """The lines of a model in onnx's text; none if the model that is read from them is another one, or they are many."""
    try:
        text = native.to_text(model)
        if len(text) > _LONGEST or _alike(native.parse_model(text)) != _alike(model):
            return []
    except (RefgradError, ValueError, RuntimeError, TypeError, native.ParseError):
        return []
    return text.strip().split("\n")


def _alike(model: ModelProto) -> ModelProto:
    """A copy in which each tensor has its numbers in the same form."""
    made = ModelProto()
    made.CopyFrom(model)
    for tensor in [*made.graph.initializer, *tensors_without_initializers(made)]:
        if tensor.data_type != TensorProto.STRING:
            tensor.CopyFrom(numpy_helper.from_array(array_of(tensor), tensor.name))
    for imported in made.opset_import:
        if not imported.domain:
            imported.ClearField("domain")  # the same as an empty one
    for node in every_node(made):
        if not node.domain:
            node.ClearField("domain")
        if not node.name:
            node.ClearField("name")
    return made


def _packed_lines(model: ModelProto) -> list[str]:
    packed = _packed(model.SerializeToString(deterministic=True))
    return [packed[k : k + _WIDTH] for k in range(0, len(packed), _WIDTH)]


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def _numbers(value: np.ndarray) -> list[Any]:
    """A tensor: its type, its sizes, and its numbers: a list, one number that stands for all, or packed bytes."""
    flat, sizes = value.reshape(-1), list(value.shape)
    kind = kind_of(value)
    if is_text(value):
        return [kind, sizes, [text if isinstance(text, str) else bytes(text).decode(errors="replace") for text in flat]]
    raw = numpy_helper.from_array(np.ascontiguousarray(value)).raw_data
    if value.dtype.name not in _PLAIN:
        return [kind, sizes, _packed(raw)]
    if (
        flat.size > 1
        and len({one.tobytes() for one in flat[:2]}) == 1
        and (flat.tobytes() == flat[:1].tobytes() * flat.size)
    ):
        return [kind, sizes, [_number(flat[0])]]
    return [kind, sizes, [_number(one) for one in flat] if flat.size <= _LISTED else _packed(raw)]


def _number(value: Any) -> Any:
    """A number as Python has it, the shortest that becomes the same in its type; NaN and infinities are texts."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool | int):
        return number
    return float(str(value)) if np.isfinite(number) else str(number)


def _literal(value: Any, indent: str = "") -> str:
    """A value as Python writes it, with a line for each entry of a dictionary, and for each line of a model."""
    deeper = f"{indent}    "
    if isinstance(value, dict) and value:
        rows = "".join(f"{deeper}{python(key)}: {_literal(one, deeper)},\n" for key, one in value.items())
        return f"{{\n{rows}{indent}}}"
    if isinstance(value, list) and len(value) > 1 and all(isinstance(one, str) for one in value):
        rows = "".join(f"{deeper}{python(one)},\n" for one in value)
        return f"[\n{rows}{indent}]"
    return python(value)


# The parts of the programs. None of them is filled in. An error may have names of the model in it, so characters that a
# terminal obeys are replaced before it is printed.

_TO_RUN = '"""Run a model, and compare with the expected results."""\n'
_TO_BUILD = '"""Ask for the gradient of a model, which fails."""\n'
_TO_COMPARE = '"""Compare the gradient of a model with the expected one."""\n'
_BEGINNING = r"""
import os
import sys
import traceback


def clean(text):
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def show(*error):
    print(clean("".join(traceback.format_exception(*error))), end="", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    kind, words = globals().get("asked", {}).get("raises", ["", ""])
    is_kind = any(kind == one.__name__ for one in type(error[1]).__mro__) and not isinstance(error[1], ImportError)
    is_fault = is_kind and " ".join(clean(str(error[1])).split()).startswith(words)
    print("The fault is still there." if is_fault else "This error is not the reported fault.", flush=True)
    os._exit(1 if is_fault else 2)


sys.excepthook = show

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def array(kind, sizes, numbers):
    # A tensor has a type, sizes and numbers; one number stands for all.
    if kind != TensorProto.STRING:
        numbers = [float(one) if isinstance(one, str) else one for one in numbers]  # "nan", "inf"
    if len(numbers) == 1:
        numbers = numbers * int(np.prod(sizes))
    return numpy_helper.to_array(helper.make_tensor("", kind, sizes, numbers))


"""
_UNPACKED = """
import base64
import zlib

plain = array


def unpacked(text):
    return zlib.decompress(base64.b64decode(text))


def array(kind, sizes, numbers):
    if isinstance(numbers, str):
        return numpy_helper.to_array(helper.make_tensor("", kind, sizes, unpacked(numbers), raw=True))
    return plain(kind, sizes, numbers)
"""
_READ = """import json
from pathlib import Path

asked = json.loads((Path(__file__).parent / "reproduce.json").read_text(encoding="utf-8"))
"""
_FORKED = """
if sys.argv[1:] != ["inside"]:  # the process may end
    import subprocess

    code = subprocess.run([sys.executable, __file__, "inside"]).returncode
    if code not in (0, 1, 2):
        print("The process ended with", code)
        print("The fault is still there.", flush=True)
    sys.exit(code if code in (0, 1, 2) else 1)
"""
_TEXT = """
import onnx.parser

model = onnx.parser.parse_model("\\n".join(asked["model"]))
"""
_PACKED = """
model = onnx.load_from_string(unpacked("".join(asked["model"])))
"""
_RUN = """

feeds = {name: array(*value) for name, value in asked["inputs"].items()}
names = list(asked["expected"])
found = run(model, names, feeds)
"""
_COMPARED = """
failed = False
for name, value in zip(names, map(np.asarray, found)):
    due = array(*asked["expected"][name])
    print(ascii(name), "expected:", due.ravel()[:8], "found:", value.ravel()[:8])
    is_text = due.dtype.kind in "OSU"
    if value.shape != due.shape or (not is_text and value.dtype != due.dtype):
        print("  type and shape:", value.dtype, value.shape, "instead of", due.dtype, due.shape)
        failed = True
    elif is_text:
        failed |= list(map(str, value.ravel())) != list(map(str, due.ravel()))
    elif due.size:
        wide = complex if due.dtype.kind == "c" else float
        kind, value, due = due.dtype, value.astype(wide), due.astype(wide)
        with np.errstate(all="ignore"):
            same = (value == due) | (np.isnan(value) & np.isnan(due))
            errors = np.where(same, 0.0, np.abs(value - due))
        errors = np.where(np.isnan(errors), np.inf, errors)
        at = np.unravel_index(int(np.argmax(errors)), errors.shape)
        allowed = float(asked["errors"].get(name, "inf")) / 2  # of the error when it was reported, or rounding
        if kind.kind in "fc":
            allowed = min(allowed, 64 * np.finfo(kind).eps * np.abs(due).max())
        failed |= bool(errors[at] > 0 and errors[at] >= allowed)
        print("  largest error:", errors[at], "at", [int(k) for k in at], "found", value[at], "instead of", due[at])
print("The fault is still there." if failed else "The fault is gone.")
sys.exit(int(failed))
"""
_TOLD = """
print("It made a gradient. The fault is gone.")
"""
_CHECKED = """
onnx.checker.check_model(made)
print("It made a gradient. The fault is gone.")
"""

_SESSION = """
import onnxruntime


def run(model, outputs, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # its messages have names of the model in them
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers).run(outputs, feeds)
"""
RUNNERS = {
    "ort-cpu": f'{_SESSION}\n\nproviders = ["CPUExecutionProvider"]\n',
    "ort-cuda": f'{_SESSION}\n\nproviders = [("CUDAExecutionProvider", {{"use_tf32": "0"}})]\n',
    "onnx.reference": """
from onnx.reference import ReferenceEvaluator


def run(model, outputs, feeds):
    return ReferenceEvaluator(model).run(outputs, feeds)
""",
    INTERPRETER: """
from refgrad.backends import get_backend


def run(model, outputs, feeds):
    results = get_backend("numpy").prepare(model).run(feeds)
    return [results[name] for name in outputs]
""",
}
_OF_A_MODULE = """
import os
from importlib import import_module
from operator import attrgetter

sys.path.append(os.getcwd())  # or its folder has to be on PYTHONPATH
module = import_module(asked["module"])
"""
_OF_A_CLASS = f"""{_OF_A_MODULE}

def run(model, outputs, feeds):
    results = attrgetter(asked["executor"])(module)().prepare(model).run(feeds)
    return [results[name] for name in outputs]
"""

_BUILDERS = {
    "refgrad": """
import refgrad

made = refgrad.gradient(model, asked["wrt"], asked["outputs"])
""",
    "refgrad:ort": """
import refgrad

made = refgrad.gradient(model, asked["wrt"], asked["outputs"], dialect="ort")
""",
    "onnx-ad": """
import onnx_ad

made = onnx_ad.reverse(model, asked["wrt"], asked["outputs"], layout="onnx")
""",
}
_OF_A_FUNCTION = f"""{_OF_A_MODULE}made = attrgetter(asked["builder"])(module)(model, asked["wrt"], asked["outputs"])
"""
_OF_ONNX_AD = """
feeds = {name: array(*value) for name, value in asked["inputs"].items()}
taken = [value.name for value in made.graph.input][len(model.graph.input) :]
returned = [value.name for value in made.graph.output][len(model.graph.output) :]
for name, output in zip(taken, asked["outputs"]):
    feeds[name] = array(*asked["cotangents"][output])[..., None]  # cotangents and gradients have a last axis of size 1
names = asked["wrt"]
found = [np.asarray(value)[..., 0] for value in run(made, returned, feeds)]
"""
_BY_NAMES = """
feeds = {name: array(*value) for name, value in asked["inputs"].items()}
feeds.update({f"{name}_grad": array(*value) for name, value in asked["cotangents"].items()})
feeds = {value.name: feeds[value.name] for value in made.graph.input if value.name in feeds}
names = asked["wrt"]
found = run(made, [f"{name}_grad" for name in names], feeds)
"""
_OF_ONNXRUNTIME = """
from refgrad.conformance import bisect  # to call the builder takes more than a line

feeds = {name: array(*value) for name, value in asked["inputs"].items()}
faults = bisect(model, feeds, asked["builder"]).faults
for fault in faults:
    print(ascii(str(fault)))
print("The fault is still there." if faults else "The fault is gone.")
sys.exit(int(bool(faults)))
"""

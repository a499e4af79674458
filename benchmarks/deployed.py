"""Models as deployment tools leave them: is each differentiated, and are the gradients right?

    python benchmarks/deployed.py FOLDER [MODEL ...] [--jobs N]

exports the architectures of examples/architectures.py as torch.onnx.export does by default, lets the model builder write the
language models of examples/language_models.py, and lets each tool of `FORMS` at them. Each result is differentiated by every
float input and every float weight, and compared

- with torch.autograd in float64 at the weights that the model has: those of a quantised model are what ONNX Runtime's own
  kernel multiplies the identity by. A weight that the tools made of several parameters, or scaled, or that stands in a folded
  constant too, is left to
- `refgrad.conformance.check`: float64 differences of the model itself along random directions, by those weights and the inputs.

Writes reports/results/deployed.json, model by model. Needs torch, transformers, onnxruntime and onnxruntime-genai.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper
from timing import RESULTS, write

ROOT = Path(__file__).resolve().parent.parent
PRINTED = ("nodes of the gradient", "gradients", "compared with torch", "seconds")  # and not written
FILE = "deployed.json"  # of reports/results
BOUND = 2e-5  # of docs/models.md
LARGE, SAMPLE = 200_000, 2  # of models with so many parameters, differences are taken by so many weights
LEVELS = ("BASIC", "EXTENDED", "ALL")  # of ONNX Runtime's optimisation
SAME = ("equal", "transposed", "merged", "reordered", "split", "x + 1")  # a cotangent is arranged as the weight is

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Subject:
    """A model as it was written, and torch's module in float64: its output at a state and feeds, and its gradients there."""

    path: Path
    feeds: Arrays
    output: str
    state: Arrays
    forward: Callable[[Mapping[str, np.ndarray], Arrays], np.ndarray]
    gradients: Callable[[Mapping[str, np.ndarray], Arrays, np.ndarray], Arrays]


def exported(name: str, folder: Path) -> Subject:
    """An architecture as torch.onnx.export writes it."""
    import torch
    from torch_models import ARCHITECTURES, build

    module, inputs = build(name)
    path = folder / f"{name}.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            kwargs=inputs,
            f=str(path),
            output_names=["output"],
            opset_version=ARCHITECTURES[name].opset,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    peer = _folded(module, path) if any(isinstance(m, torch.nn.BatchNorm2d) for m in module.modules()) else module
    return _subject(path, peer, {k: x.numpy() for k, x in inputs.items()}, "output", lambda m, x: m(**x))


def _folded(module: Any, path: Path) -> Any:
    """The module with each BatchNormalization in the convolution before it, as exporters fold it, and their very numbers."""
    import torch
    from torch.fx.experimental.optimization import fuse

    peer = fuse(module.eval()).requires_grad_()  # the biases that it adds as well
    held = [numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer]
    with torch.no_grad():
        for parameter in peer.parameters():
            value = parameter.numpy()
            near = [one for one in held if one.shape == value.shape and np.allclose(one, value, rtol=1e-4, atol=1e-5)]
            if len(near) == 1:
                parameter.copy_(torch.tensor(near[0]))
    return peer


def built(name: str, precision: str, tokens: int, past: int, folder: Path) -> Subject:
    """A language model as the model builder writes it."""
    import language_models

    path = folder / "llm" / name / precision / ("decoder.onnx" if name == "whisper" else "model.onnx")
    if not path.exists():
        language_models.write(name, precision, folder / "llm")
    feeds = language_models.inputs(name, tokens, past)
    module = language_models.build(name)
    return _subject(path, module, feeds, "logits", lambda m, x: language_models.forward(name, m, x))


def _subject(path: Path, module: Any, feeds: Arrays, output: str, forward: Callable[[Any, Any], Any]) -> Subject:
    import torch

    def at(state: Mapping[str, np.ndarray], feeds: Arrays) -> tuple[Any, Arrays]:
        wide = module.double()
        wide.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
        return wide, {k: torch.tensor(v.astype(np.float64) if v.dtype.kind == "f" else v) for k, v in feeds.items()}

    def outputs(state: Mapping[str, np.ndarray], feeds: Arrays) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(forward(*at(state, feeds)))

    def gradients(state: Mapping[str, np.ndarray], feeds: Arrays, cotangent: np.ndarray) -> Arrays:
        wide, given = at(state, feeds)
        moved = {k: x.requires_grad_() for k, x in given.items() if x.is_floating_point() and x.numel()}
        moved |= {k: p for k, p in wide.named_parameters(remove_duplicate=False) if p.requires_grad}
        result = forward(wide, given)
        found = torch.autograd.grad(result, list(moved.values()), torch.tensor(cotangent).double(), allow_unused=True)
        return {k: g.numpy() for k, g in zip(moved, found, strict=True) if g is not None}  # torch does not read all

    return Subject(path, feeds, output, {k: v.numpy() for k, v in module.state_dict().items()}, outputs, gradients)


# The tools


def _optimized_by_transformers(subject: Subject, folder: Path, saved: bool) -> ModelProto | Path:
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    name = subject.path.stem
    kinds = {"gpt2": "gpt2", "t5": "t5", "bart": "bart", "vit": "vit", "swin": "swin", "clip": "clip", "unet": "unet"}
    kind = kinds.get(name, "bert")
    sizes = {"bert": 256, "gpt2": 256, "model": 0, "decoder": 0}  # those of the model builder: found by the optimiser
    size = 0 if kind in ("swin", "unet") else sizes.get(name, 32)
    made = optimizer.optimize_model(
        str(subject.path),
        kind,
        num_heads=4 if size else 0,
        hidden_size=size,
        optimization_options=FusionOptions(kind),
    )
    if not saved:
        return made.model  # type: ignore[no-any-return]
    made.save_model_to_file(str(folder / "optimized.onnx"))
    return folder / "optimized.onnx"


def _at_level(level: str) -> Callable[[Subject, Path], Path]:
    def form(subject: Subject, folder: Path) -> Path:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
        path = subject.path.with_name(f"{subject.path.stem}.{level}.onnx")  # beside the data of the model
        options.optimized_model_filepath = str(path)
        options.log_severity_level = 4
        onnxruntime.InferenceSession(str(subject.path), options)
        return path

    return form


def _quantized(bits: int, symmetric: bool, as_qdq: bool = False) -> Callable[[Subject, Path], ModelProto]:
    def form(subject: Subject, folder: Path) -> ModelProto:
        from onnxruntime.quantization import QuantFormat
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        model = onnx.load(subject.path)
        if as_qdq and max(one.version for one in model.opset_import) < 21:  # DequantizeLinear in blocks
            model = onnx.version_converter.convert_version(model, 21)
        made = MatMulNBitsQuantizer(
            model,
            bits=bits,
            block_size=16,
            is_symmetric=symmetric,
            quant_format=QuantFormat.QDQ if as_qdq else QuantFormat.QOperator,
        )
        made.process()
        return made.model.model  # type: ignore[no-any-return]

    return form


def _static_qdq(subject: Subject, folder: Path) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Feeds(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [subject.feeds]

        def get_next(self) -> Arrays | None:
            return self.left.pop() if self.left else None

    quantize_static(str(subject.path), str(folder / "qdq.onnx"), Feeds(), QuantFormat.QDQ, per_channel=True)
    return folder / "qdq.onnx"


def _float16(subject: Subject, folder: Path) -> ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert_float_to_float16(onnx.load(subject.path), keep_io_types=True)  # type: ignore[no-any-return]


FORMS: dict[str, Callable[[Subject, Path], ModelProto | Path]] = {
    "as exported": lambda subject, folder: subject.path,
    "transformer optimiser, saved": lambda subject, folder: _optimized_by_transformers(subject, folder, True),
    "transformer optimiser, in memory": lambda subject, folder: _optimized_by_transformers(subject, folder, False),
    "4-bit weights": _quantized(4, True),
    "4-bit weights, zero points": _quantized(4, False),
    "8-bit weights": _quantized(8, True),
    "4-bit weights, QDQ": _quantized(4, True, as_qdq=True),
    "QDQ": _static_qdq,
    "float16": _float16,
    **{level: _at_level(level) for level in LEVELS},
}
OF_FLOATS = ("transformer optimiser, saved", "transformer optimiser, in memory", "8-bit weights", "float16")


# The weights that a quantised model has


def dequantized(model: ModelProto, state: Arrays) -> Arrays:
    """The state with the matrices that the model's MatMulNBits, or blocked DequantizeLinear, stand for.

    Which parameter a matrix is of is told by its values: they are nearer than half a step of the quantisation.
    """
    found = dict(state)
    matrices = [(k, v) for k, v in state.items() if v.dtype.kind == "f" and v.ndim >= 2]
    for matrix in _matrices(model):
        rows = 0
        while rows < len(matrix):  # of several parameters, one below the other, or of a part of one
            best = min(_likenesses(matrix, rows, matrices), default=None)
            if best is None or best[0] > 0.25:
                raise ValueError(f"no parameter is like a matrix of {matrix.shape} from row {rows} on: {best}")
            _, key, turned, start, count = best
            before = found[key].reshape(len(state[key]), -1)
            value = np.array(before.T if turned else before)
            value[start : start + count] = matrix[rows : rows + count]
            value = np.ascontiguousarray(value.T if turned else value).reshape(state[key].shape)
            tied = [k for k, v in matrices if v.shape == value.shape and np.array_equal(v, state[key])]
            found |= dict.fromkeys(tied, value)
            rows += count
    return found


def _likenesses(
    matrix: np.ndarray, rows: int, known: Sequence[tuple[str, np.ndarray]]
) -> Iterator[tuple[float, str, bool, int, int]]:
    """How far what follows in the matrix is from rows of each parameter: its name, whether it is turned, and which rows."""
    left = len(matrix) - rows
    for key, value in known:
        for turned, flat in ((False, value.reshape(len(value), -1)), (True, value.reshape(len(value), -1).T)):
            if flat.shape[1] != matrix.shape[1]:
                continue
            count = min(len(flat), left)
            for start in range(0, len(flat) - count + 1, count):
                like, part = flat[start : start + count], matrix[rows : rows + count]
                yield (
                    float(np.abs(part - like).mean() / max(float(np.abs(like).mean()), 1e-30)),
                    key,
                    turned,
                    start,
                    count,
                )


def _matrices(model: ModelProto) -> list[np.ndarray]:
    """Each quantised matrix as (outputs, inputs): what ONNX Runtime makes of the identity."""
    import onnxruntime

    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    made = {name: node for node in model.graph.node for name in node.output}
    found = []
    for node in model.graph.node:
        copy = onnx.NodeProto()
        if node.op_type == "MatMulNBits":
            copy.CopyFrom(node)
            width = next(a.i for a in node.attribute if a.name == "K")
            copy.input[0] = "identity"
            if len(copy.input) > 5:
                copy.input[5] = ""
            nodes, result = [copy], copy.output[0]
        elif node.op_type == "MatMul" and node.input[1] in made and made[node.input[1]].op_type == "DequantizeLinear":
            copy.CopyFrom(made[node.input[1]])
            width = tensors[copy.input[0]].dims[0]
            product = helper.make_node("MatMul", ["identity", copy.output[0]], ["product"])
            nodes, result = [copy, product], "product"
        else:
            continue
        shape = helper.make_tensor_value_info("identity", onnx.TensorProto.FLOAT, [width, width])
        out = helper.make_tensor_value_info(result, onnx.TensorProto.FLOAT, None)
        kept = [tensors[name] for one in nodes for name in one.input if name in tensors]
        graph = helper.make_graph(nodes, "matrix", [shape], [out], kept)
        small = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
        session = onnxruntime.InferenceSession(small.SerializeToString())
        found.append(session.run(None, {"identity": np.eye(width, dtype=np.float32)})[0].T)
    return found


# The comparison


def measure(subject: Subject, form: str, made: ModelProto | Path) -> dict[str, Any]:
    """How far the gradient of a form of the model is from torch's, and what `check` says of it."""
    from torch_models import errors, vanishing

    import refgrad
    from refgrad.backends import get_backend
    from refgrad.conformance import check

    model = onnx.load(made) if isinstance(made, Path) else made
    if any(subject.path.parent.glob("*.data")):  # a gradient of the path would refer to that file
        made = model
    if form.endswith("QDQ") and "weights" not in form:
        return _of_rounded(made, model, subject)
    state = subject.state
    if "float16" in form:
        state = {k: v.astype(np.float16).astype(v.dtype) if v.dtype.kind == "f" else v for k, v in state.items()}
    elif "weights" in form or form.startswith("int4"):
        state = dequantized(model, state)
    gradient = refgrad.gradient(made, outputs=[subject.output])
    names = [value.name.removesuffix("_grad") for value in gradient.graph.output]
    row: dict[str, Any] = {"nodes of the gradient": len(gradient.graph.node), "gradients": len(names)}
    shape = np.asarray(get_backend("numpy").prepare(made).run(subject.feeds)[subject.output]).shape
    cotangent = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    arranged = _arranged(model, state, form)
    truth = subject.gradients(state, subject.feeds, cotangent)
    truth = {k: truth[k] for k in subject.feeds if k in truth} | {
        name: _by_initializer(one, truth) for name, one in arranged.items() if all(k in truth for k in one.names)
    }
    truth = {f"{k}_grad": v for k, v in truth.items() if k in names}
    feeds = subject.feeds | {f"{subject.output}_grad": cotangent}
    inputs = {f"{k}_grad" for k in subject.feeds}
    for title, precision in (("numpy float64", "float64"), ("ort-cpu", None)):
        if title == "ort-cpu" and "float16" in form:
            continue  # rounding to 16 bits is no error of the gradient: check judges it
        backend = get_backend(title.split()[0])
        prepared = backend.prepare(gradient, precision=precision) if precision else backend.prepare(gradient)
        results = prepared.run(feeds)
        if precision and "float16" not in form:
            apart = [k for k, e in errors(results, truth).items() if e > BOUND and k not in inputs]
            for key in apart:
                name = key.removesuffix("_grad")
                if _stands_elsewhere(model, subject, state, name, arranged[name]):
                    del truth[key]
        noise = vanishing(truth)
        kept = {k: e for k, e in errors(results, truth).items() if precision or k not in noise}
        row[f"{title}: input"] = max((e for k, e in kept.items() if k in inputs), default=0.0)
        row[f"{title}: weights"] = max((e for k, e in kept.items() if k not in inputs), default=0.0)
    row["compared with torch"] = len(truth)
    by_torch = {name.removesuffix("_grad") for name in truth} - subject.feeds.keys()
    # Constants of 16 bits are not those of torch, so there torch is no judge.
    wrt = [name for name in names if name not in by_torch or "float16" in form]
    if sum(value.size for value in state.values()) > LARGE:
        left = [name for name in wrt if f"{name}_grad" not in truth]
        wrt = list(map(str, np.random.default_rng(2).permutation(left)[:SAMPLE])) or names[:1]
    judged = check(made, subject.feeds, wrt=wrt, outputs=[subject.output], dialects=["onnx"], directions=1)
    return row | {"check": "ok" if judged.ok else _faults(judged)}


def _arranged(model: ModelProto, state: Arrays, form: str) -> dict[str, Any]:
    """The model's initializers that are parameters, arranged otherwise at most: `refgrad.weights` says how."""
    import refgrad

    kind = np.float16 if "float16" in form else np.float32
    known = refgrad.weights(model, {k: v.astype(kind) if v.dtype.kind == "f" else v for k, v in state.items()})
    users = Counter(key for one in known.values() if one.how != "split" for key in one.names)
    return {
        name: one
        for name, one in known.items()
        if one.source is not None and one.how in SAME and all(users[k] < 2 for k in one.names)
    }


def _by_initializer(one: Any, gradients: Arrays) -> np.ndarray:
    """Torch's gradient as the initializer is arranged."""
    made = one.source.make(gradients) if one.how != "x + 1" else gradients[one.names[0]]
    return np.asarray(made, np.float64).reshape(one.shape)


def _stands_elsewhere(model: ModelProto, subject: Subject, state: Arrays, name: str, one: Any) -> bool:
    """True if the model has the parameter in another constant too: with it, the output moves elsewhere than torch's does."""
    import refgrad
    from refgrad.backends import get_backend

    rng = np.random.default_rng(3)
    moved = state | {k: state[k] + 0.1 * rng.standard_normal(state[k].shape).astype(state[k].dtype) for k in one.names}
    value = np.asarray(one.source.make(moved), state[one.names[0]].dtype).reshape(one.shape)
    changed = get_backend("numpy").prepare(refgrad.write_back(model, {name: value}), precision="float64")
    before, after = (subject.forward(s, subject.feeds) for s in (state, moved))
    return bool(np.abs(changed.run(subject.feeds)[subject.output] - after).max() > 1e-3 * np.abs(after - before).max())


def _of_rounded(made: ModelProto | Path, model: ModelProto, subject: Subject) -> dict[str, Any]:
    """Compare a straight-through gradient with that of a model in which what rounding added is a constant.

    `check` says whether the latter is right, by its float64 differences. The scales of the rounded values are left out.
    In double the constant, a float, moves a value that is at a kink off it, to either side; in float it is exact, but other
    gradients cancel. Where the two are the same to the bound in one of them, they are the same.
    """
    import refgrad
    from refgrad.conformance import check

    through = refgrad.gradient(made, outputs=[subject.output], quantization="straight-through")
    rng = np.random.default_rng(1)
    for precision in ("float64", None):
        smooth, scales = _without_rounding(model, subject, precision)
        wrt = [v.name.removesuffix("_grad") for v in through.graph.output if v.name.removesuffix("_grad") not in scales]
        apart = _apart(through, refgrad.gradient(smooth, wrt, [subject.output]), subject, precision)
        if apart <= BOUND:
            break
    # Rounded values are at kinks: 0 at that of Selu, equal ones at that of a maximum. Beside them there is a derivative.
    beside = {k: x + 0.01 * rng.standard_normal(x.shape).astype(x.dtype) if x.dtype.kind == "f" else x
              for k, x in subject.feeds.items()}  # fmt: skip
    judged = check(smooth, beside, wrt=wrt, outputs=[subject.output], dialects=["onnx"], backends=["numpy"])
    return {"gradients": len(wrt), "straight-through: all": apart, "check": "ok" if judged.ok else _faults(judged)}


def _without_rounding(model: ModelProto, subject: Subject, precision: str | None) -> tuple[ModelProto, set[str]]:
    """A model in which what rounding added at the feeds is a constant, and the scales of what was rounded."""
    from refgrad.backends import get_backend

    values = get_backend("numpy").prepare(model, precision=precision).run(subject.feeds, trace=True)
    smooth = ModelProto()
    smooth.CopyFrom(model)
    rounds = {node.output[0]: node for node in smooth.graph.node if node.op_type == "QuantizeLinear"}
    scales = set()
    for node in smooth.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in rounds:
            before = rounds[node.input[0]].input[0]
            scales |= {node.input[1], rounds[node.input[0]].input[1]}
            added = np.asarray(values[node.output[0]] - values[before], np.float32)
            smooth.graph.initializer.append(numpy_helper.from_array(added, f"{node.output[0]}_added"))
            node.CopyFrom(helper.make_node("Add", [before, f"{node.output[0]}_added"], node.output, node.name))
    return smooth, scales


def _apart(through: ModelProto, expected: ModelProto, subject: Subject, precision: str | None) -> float:
    """The largest error of a gradient, for a random cotangent."""
    from torch_models import errors, vanishing

    from refgrad.backends import get_backend

    numpy = get_backend("numpy")
    shape = numpy.prepare(subject.path).run(subject.feeds)[subject.output].shape
    drawn = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    feeds = subject.feeds | {f"{subject.output}_grad": drawn}
    got, every = (numpy.prepare(g, precision=precision).run(feeds) for g in (through, expected))
    wanted = {k: v for k, v in every.items() if v.size and np.isfinite(v).all()}  # a negative base has no exponent
    noise = vanishing(wanted)
    found = [error for key, error in errors(got, wanted).items() if key not in noise]
    return float(np.max(np.nan_to_num(found, nan=np.inf)))


def _faults(judged: Any) -> str:
    return "; ".join(f"{row.gradient} on {row.backend}: {row.verdict}" for row in judged.faults)[:300]


def rows_of(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each form of a model; `llm/NAME` is one of the language models."""
    import language_models

    place = folder / name.replace("/", "_")
    place.mkdir(parents=True, exist_ok=True)
    if not name.startswith("llm/"):
        subject = exported(name, place)
        for form, make in FORMS.items():
            yield _row(name, form, lambda s=subject, m=make: (s, m(s, place)))  # type: ignore[misc]
        return
    name = name.removeprefix("llm/")
    model = language_models.MODELS[name]
    for precision in model.precisions:
        runs = ((7, 0), (1, 5)) if model.past is not None else ((7, 0),)
        for tokens, past in runs:
            title = f"{precision}, {past} of the past" if past else precision
            subject = built(name, precision, tokens, past, folder)
            yield _row(f"llm/{name}", title, lambda s=subject: (s, s.path))  # type: ignore[misc]
            forms = () if past else (*LEVELS, *(OF_FLOATS if precision == "fp32" else ()))
            if precision == "fp32" and (tokens, past) == runs[-1]:  # calibration does not take caches of no tokens
                forms = (*forms, "QDQ")
            for form in forms:
                yield _row(f"llm/{name}", f"{title}, {form}", lambda s=subject, f=form: (s, FORMS[f](s, place)))  # type: ignore[misc]


def _check_runtime_reads(made: ModelProto | Path) -> None:
    """Raise what ONNX Runtime says of a model that is no valid one, however it came to be: a tool wrote it so."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernelError

    source = str(made) if isinstance(made, Path) else made.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with contextlib.suppress(NoKernelError):  # a valid model, with an operator that has no kernel on the CPU
        onnxruntime.InferenceSession(source, options)


def _row(name: str, form: str, make: Callable[[], tuple[Subject, ModelProto | Path]]) -> dict[str, Any]:
    start = time.perf_counter()
    row: dict[str, Any] = {"model": name, "form": form}
    try:
        subject, made = make()
        _check_runtime_reads(made)
    except Exception as error:  # a tool raises anything
        return row | {"tool": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    try:
        row |= measure(subject, form, made)
    except Exception as error:
        row |= {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        if "-v" in sys.argv:
            traceback.print_exc()
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _all_of(task: tuple[str, Path]) -> tuple[str, list[dict[str, Any]]]:
    import onnxruntime

    name, folder = task

    onnxruntime.set_default_logger_severity(4)
    logging.disable(logging.WARNING)
    found = []
    for row in rows_of(name, folder):
        found.append({k: float(f"{v:.1e}") if isinstance(v, float) and k != "seconds" else v for k, v in row.items()})
        print(json.dumps(found[-1]), flush=True)
    return name, found


def main() -> None:
    """Measure every form of every model."""
    sys.path.insert(0, str(ROOT / "examples"))
    from language_models import MODELS
    from torch_models import ARCHITECTURES

    every = [*ARCHITECTURES, *(f"llm/{name}" for name in MODELS)]
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(every))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("-v", action="store_true", help="print tracebacks")
    arguments = parser.parse_args()
    names = arguments.models or every
    rows = json.loads((RESULTS / FILE).read_text(encoding="utf-8")) if (RESULTS / FILE).exists() else []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, initializer=_find_examples) as pool:
        for name, made in pool.imap(_all_of, [(name, arguments.folder) for name in names]):
            rows = [row for row in rows if row["model"] != name]
            rows += [{key: value for key, value in row.items() if key not in PRINTED} for row in made]
            rows.sort(key=lambda row: every.index(row["model"]))
            write(FILE, rows)


def _find_examples() -> None:
    sys.path.insert(0, str(ROOT / "examples"))


if __name__ == "__main__":
    main()

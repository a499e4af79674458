"""Running time of forward plus backward for the input and all weights.

    python examples/torch_models.py FOLDER
    python benchmarks/run_time.py FOLDER                    # which comparison depends on what is installed
    python benchmarks/run_time.py FOLDER --cuda [MODEL ...]  # on a GPU; needs onnxruntime-gpu and torch

With onnxruntime-training-cpu: both dialects against the graph of ONNX Runtime's own builder, on the same wheel. With
onnxruntime and torch: dialect "onnx" against torch eager, and the interpreter against torch eager. Two threads each.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from on_device import Job, add_arguments, means, rows_on_device, save_so_far, settings
from onnx import numpy_helper
from timing import RESULTS, alternate_processes, save

import refgrad

THREADS = 2
ROUNDS = 15
GOALS = {  # the models of the table, and the most that ONNX Runtime may take of torch's time
    "mlp": 1.0,
    "resnet18": 0.7,
    "mobilenet": 0.7,
    "lstm": 0.6,
    "bert": 0.6,
    "gpt2": 0.6,
    "vit": 0.6,
    "t5": 0.6,
    "gpt2_small": 0.5,
}
INTERPRETER = 1.5  # the most that the interpreter may take
PRODUCT = "matmul"  # of two matrices, forward alone: the yardstick of the machine, without a goal
SIZE = 1024
SMALL = "gpt2_small"  # 124 million weights in a file beside the model


def runner(model: onnx.ModelProto | Path, feeds: dict[str, np.ndarray]) -> Callable[[], Any]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = THREADS, 3
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    taken = {name.name for name in session.get_inputs()}
    of = onnxruntime.OrtValue.ortvalue_from_numpy
    fed = {name: of(np.ascontiguousarray(value)) for name, value in feeds.items() if name in taken}
    names = [value.name for value in session.get_outputs()]
    return lambda: session.run_with_ort_values(names, fed)


def load(folder: Path, name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """The model, its feeds with the cotangent, and what to differentiate with respect to."""
    model = onnx.load(folder / f"{name}.onnx")
    model.ir_version = min(model.ir_version, 10)
    data = np.load(folder / f"{name}.npz")
    feeds = {key.partition("/")[2]: data[key] for key in data if key.startswith(("feed/", "cotangent/"))}
    wrt = [key.removeprefix("float32/").removesuffix("_grad") for key in data if key.startswith("float32/")]
    return model, feeds, wrt


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each BatchNormalization folded into the Conv before it: ONNX Runtime's builder has no rule for it."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    conv = {node.output[0]: node for node in model.graph.node if node.op_type == "Conv"}
    for node in [node for node in model.graph.node if node.op_type == "BatchNormalization"]:
        scale, bias, mean, var = (numpy_helper.to_array(weights[name]) for name in node.input[1:])
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        factor = scale / np.sqrt(var + epsilon)
        producer = conv[node.input[0]]
        kernel = weights[producer.input[1]]
        value = numpy_helper.to_array(kernel) * factor.reshape(-1, 1, 1, 1)
        kernel.CopyFrom(numpy_helper.from_array(value.astype(np.float32), kernel.name))
        shift = weights[node.input[2]]
        shift.CopyFrom(numpy_helper.from_array((bias - mean * factor).astype(np.float32), shift.name))
        producer.input.append(shift.name)
        producer.output[0] = node.output[0]
        model.graph.node.remove(node)
    return model


def with_loss(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the scalar loss Σ output·weight: ONNX Runtime's builder wants a scalar."""
    output = model.graph.output[0]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    value = graph.input.add()
    value.CopyFrom(output)
    value.name = "weight"
    graph.node.append(onnx.helper.make_node("Mul", [output.name, "weight"], ["weighted"], "weighted"))
    graph.node.append(onnx.helper.make_node("ReduceSum", ["weighted"], ["loss"], "loss", keepdims=0))
    graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    return result


def onnxruntime_gradient(model: onnx.ModelProto, wrt: list[str]) -> onnx.ModelProto:
    """ONNX Runtime's own graph, the weights inputs with a default as in ours: a constant one would be packed beforehand."""
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    builder = GradientGraphBuilder(model.SerializeToString(), {"loss"}, set(wrt), "loss")
    builder.build()
    with tempfile.TemporaryDirectory() as folder:
        builder.save(f"{folder}/grad.onnx")
        gradient = onnx.load(f"{folder}/grad.onnx")
    inputs = {value.name for value in gradient.graph.input}
    gradient.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        for tensor in gradient.graph.initializer
        if tensor.name in wrt and tensor.name not in inputs
    )
    return gradient


def prepared(folder: Path, name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """The model as ONNX Runtime's builder can differentiate it."""
    model, feeds, wrt = load(folder, name)
    feeds["weight"] = feeds.pop(f"{model.graph.output[0].name}_grad")
    model = with_loss(folded(model))
    read = {key for node in model.graph.node for key in node.input}
    return model, feeds, [key for key in wrt if key in read]


def ours_on_wheel(folder: Path, name: str, dialect: str) -> Callable[[], Any]:
    model, feeds, wrt = prepared(folder, name)
    return runner(refgrad.gradient(model, wrt=wrt, dialect=dialect, cotangent="ones"), feeds)


def theirs_on_wheel(folder: Path, name: str, dialect: str) -> Callable[[], Any]:
    model, feeds, wrt = prepared(folder, name)
    return runner(onnxruntime_gradient(model, wrt), feeds)


def step(folder: Path, name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model of a step, and its feeds."""
    if name == PRODUCT:
        square = f"float[{SIZE}, {SIZE}]"
        header = '<ir_version: 10, opset_import: ["": 21]>'
        text = f"{header} product ({square} a, {square} b) => ({square} c) {{ c = MatMul(a, b) }}"
        return onnx.parser.parse_model(text), operands()
    if name == SMALL:
        path = folder / f"{SMALL}.onnx"
        feeds = dict(np.load(folder / f"{SMALL}.npz"))
        wrt = [tensor.name for tensor in onnx.load(path, load_external_data=False).graph.initializer]
        wrt = [key for key in wrt if key.endswith((".weight", ".bias"))]
        return refgrad.gradient(str(path), wrt=wrt, keep_outputs=True), feeds
    model, feeds, wrt = load(folder, name)
    return refgrad.gradient(model, wrt=wrt, keep_outputs=True), feeds


def operands() -> dict[str, np.ndarray]:
    """The matrices of the one product."""
    a, b = np.random.default_rng(0).standard_normal((2, SIZE, SIZE), np.float32)
    return {"a": a, "b": b}


def ours_on_stock(folder: Path, name: str) -> Callable[[], Any]:
    made, feeds = step(folder, name)
    return runner(written(folder, made) if name == SMALL else made, feeds)


def written(folder: Path, made: onnx.ModelProto) -> Path:
    """The file of a gradient, which reads the weights of its model from the file beside it."""
    path = folder / f"{SMALL}_grad.onnx"
    onnx.save(made, path)
    return path


def ours_on_interpreter(folder: Path, name: str) -> Callable[[], Any]:
    from refgrad.backends import get_backend

    made, feeds = step(folder, name)
    prepared = get_backend("numpy").prepare(written(folder, made) if name == SMALL else made)
    taken = {value.name for value in made.graph.input}
    fed = {key: value for key, value in feeds.items() if key in taken}
    return lambda: prepared.run(fed)


def small() -> tuple[Any, dict[str, Any]]:
    """GPT-2 small with its default sizes and random weights, and 64 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()

        def forward(self, input_ids: Any) -> Any:
            return self.model(input_ids=input_ids).logits

    return Logits().eval(), {"input_ids": torch.randint(0, 50257, (1, 64))}


def write_small(folder: Path) -> None:
    """GPT-2 small as the exporter writes it, its weights beside it."""
    import torch

    module, inputs = small()
    program = torch.onnx.export(
        module, kwargs=inputs, output_names=["output"], dynamo=True, opset_version=21, verbose=False
    )
    assert program is not None
    program.save(str(folder / f"{SMALL}.onnx"), external_data=True)
    cotangent = np.random.default_rng(0).standard_normal((1, 64, 50257)).astype(np.float32)
    np.savez(folder / f"{SMALL}.npz", input_ids=inputs["input_ids"].numpy(), output_grad=cotangent)


def torch_eager(folder: Path, name: str) -> Callable[[], Any]:
    import torch
    from torch_models import build

    torch.set_num_threads(THREADS)
    if name == PRODUCT:
        a, b = (torch.from_numpy(value) for value in operands().values())
        return lambda: a @ b
    feeds = dict(np.load(folder / f"{SMALL}.npz")) if name == SMALL else load(folder, name)[1]
    module, inputs = small() if name == SMALL else build(name)
    inputs = {key: x.requires_grad_() if x.is_floating_point() else x for key, x in inputs.items()}
    leaves = [x for x in inputs.values() if x.requires_grad] + list(module.parameters())
    cotangent = torch.from_numpy(feeds["output_grad"])
    return lambda: torch.autograd.grad(module(**inputs), leaves, cotangent)


def against_builder(folder: Path) -> None:
    rows = []
    for name in ("mlp", "resnet18"):
        for dialect in ("ort", "onnx"):
            times = alternate_processes(ours_on_wheel, theirs_on_wheel, (folder, name, dialect), ROUNDS)
            rows.append(row(name, dialect, "onnxruntime's graph", times))
    save("run_time_builder", rows)


def against_torch(folder: Path) -> None:
    rows = []
    if not (folder / f"{SMALL}.npz").exists():
        write_small(folder)
    for system, ours in (("ONNX Runtime", ours_on_stock), ("the interpreter", ours_on_interpreter)):
        for name, goal in ({PRODUCT: ""} | GOALS).items():
            big = name == SMALL
            times = alternate_processes(ours, torch_eager, (folder, name), 5 if big else ROUNDS, 1 if big else 7)
            found = {"model": name, "system": system} | row(name, "onnx", "torch eager", times)
            rows.append(found | {"goal": INTERPRETER if goal and ours is ours_on_interpreter else goal})
            print(rows[-1], flush=True)
    save("run_time_torch", rows)


# On a GPU


def gradient_job(folder: Path, key: str) -> Job:
    """The step of a model, its weights among the feeds, with torch's gradients in double precision.

    Those of the large model are ONNX Runtime's on the CPU.
    """
    made, feeds = step(folder, key)
    source = str(written(folder, made)) if key == SMALL else made.SerializeToString()
    weights = {tensor.name: numpy_helper.to_array(tensor, str(folder)) for tensor in made.graph.initializer}
    inputs = [value.name for value in made.graph.input]
    outputs = [value.name for value in made.graph.output]
    fed = {name: feeds.get(name, weights.get(name)) for name in inputs}
    if key == SMALL:
        results = dict(zip(outputs, (value.numpy() for value in runner(Path(source), feeds)()), strict=True))
    else:
        data = np.load(folder / f"{key}.npz")
        results = {key.partition("/")[2]: data[key] for key in data if key.startswith(("output/", "float64/"))}
    expected = {name: results[name].astype(np.float32) for name in outputs}
    return Job(source, fed, expected, weights)


def torch_on_device(key: str, job: Job, device: str, compiled: bool) -> tuple[list[str], Callable[[], Any]]:
    """Forward and backward of the module, with the weights and the inputs of the job.

    The exporter merges equal vectors of the large model, such as its biases: their gradients are not compared.
    """
    import torch
    from torch_models import build

    module, inputs = small() if key == SMALL else build(key)
    for name, tensor in module.state_dict().items():
        if name in job.more and job.more[name].shape == tensor.shape:
            tensor.copy_(torch.from_numpy(np.array(job.more[name])))
    module.to(device)
    for part in module.modules():
        if isinstance(part, torch.nn.RNNBase):
            part.train()  # cuDNN differentiates nothing else; there is no dropout
    tensors = {name: torch.from_numpy(job.feeds[name]).to(device) for name in inputs}
    moved = {f"{name}_grad": x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}
    names = {parameter: name for name, parameter in module.named_parameters(remove_duplicate=False)}
    moved |= {f"{name}_grad": parameter for parameter, name in names.items()}
    compared = [name if key != SMALL or x.ndim > 1 else f"one of merged {name}" for name, x in moved.items()]
    cotangent = torch.from_numpy(job.feeds["output_grad"]).to(device)
    call = torch.compile(module, dynamic=False) if compiled else module

    def run() -> list[Any]:
        output = call(**tensors)
        return [output, *torch.autograd.grad(output, list(moved.values()), cotangent)]

    return ["output", *compared], run


def on_gpu(folder: Path, arguments: argparse.Namespace) -> None:
    """The table of models on a GPU, saved row by row: the large one last, by itself."""
    output = arguments.output
    if output is None and not arguments.models and arguments.device == "cuda":
        output = RESULTS / "run_time_cuda.json"
    found: list[dict[str, Any]] = []
    chosen = arguments.models or list(GOALS)
    for models in ([name for name in chosen if name != SMALL], [name for name in chosen if name == SMALL]):
        if models == [SMALL] and not (folder / f"{SMALL}.npz").exists():
            write_small(folder)
        write = functools.partial(gradient_job, folder)
        for name, figures in rows_on_device(models, write, torch_on_device, *settings(arguments)):
            found.append({"model": name, **figures})
            save_so_far(found, output)
    print(means(found))


def row(name: str, dialect: str, other: str, times: tuple[float, float, float]) -> dict[str, Any]:
    return {
        "model": name,
        "dialect": dialect,
        "against": other,
        "refgrad ms": round(times[0] * 1e3, 2),
        "other ms": round(times[1] * 1e3, 2),
        "ratio": round(times[2], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where examples/torch_models.py wrote the models")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"with --cuda: {', '.join(GOALS)}")
    add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder
    if arguments.cuda:
        on_gpu(folder, arguments)
    elif hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder"):
        against_builder(folder)
    else:
        against_torch(folder)


if __name__ == "__main__":
    main()

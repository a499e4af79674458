"""Recurrence and control flow as torch's exporters write them: the gradients of inputs and weights equal autograd's.

Both exporters: "dynamo" and "script", the older one, which alone writes loops and branches of `torch.jit.script`. It knows
nothing of `while_loop`, `scan` and `cond`, which the newer one does. Weights are told by name: nothing is folded into them.
"""

import contextlib
import copy
import functools
import io

import numpy as np
import onnx
import pytest

import refgrad
from refgrad.backends import available, get_backend
from refgrad.errors import BackendError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # the exporters warn of each other

TOLERANCE = 1e-5  # of the largest element


class Recurrent(torch.nn.Module):
    def __init__(self, kind, batch_first):
        super().__init__()
        self.cells = getattr(torch.nn, kind)(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)

    def forward(self, x):
        y, last = self.cells(x)
        return y, *(last if isinstance(last, tuple) else (last,))


class While(torch.nn.Module):
    """The number of steps is a value of the graph."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        step = torch.tensor(0)
        return torch._higher_order_ops.while_loop(
            lambda i, h: i < 4, lambda i, h: (i + 1, torch.tanh(self.linear(h))), (step, x)
        )[1]


class Scan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, start, xs):
        def step(h, x):
            h = torch.tanh(self.linear(h) + x)
            return h, h * x

        return torch._higher_order_ops.scan(step, start, xs)


class Cond(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.then, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        taken, left = lambda x: torch.tanh(self.then(x)), lambda x: torch.sin(self.other(x))
        return torch.cond(x.sum() > 0, taken, left, (x,))


def for_loop(h, w):
    for i in range(4):
        h = torch.tanh(h @ w) * (i + 1)
    return h


def while_loop(h, w):
    while bool(h.sum() < 9.0):
        h = h + torch.sigmoid(h @ w)
    return h


def branch(h, w):
    if h.sum() > 0:  # noqa: SIM108
        y = torch.tanh(h @ w)
    else:
        y = torch.sin(h @ w) * 2
    return y


def branch_in_loop(h, w):
    for i in range(3):
        if bool(h.sum() > 0):  # noqa: SIM108
            h = torch.tanh(h @ w)
        else:
            h = torch.sin(h @ w) + i
    return h


def unrolled_by_hand(xs, w):
    h = torch.zeros(2, 3)
    ys = []
    for i in range(xs.size(0)):
        h = torch.tanh(xs[i] @ w + h)
        ys.append(h)
    return torch.stack(ys)


class Scripted(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 3))
        self.function = function

    def forward(self, x):
        return self.function(x, self.w)


def draw(*sizes, offset=0.0):
    return torch.randn(sizes) + offset


# Exporter, module, inputs.
CASES = {
    **{
        f"{kind}, {'batch' if batch_first else 'time'} first, {exporter}": (
            exporter,
            lambda kind=kind, batch_first=batch_first: Recurrent(kind, batch_first),
            lambda: (draw(5, 2, 3),),
        )
        for kind in ("RNN", "GRU", "LSTM")
        for batch_first in (False, True)
        for exporter in ("dynamo", "script")
    },
    "while_loop": ("dynamo", While, lambda: (draw(2, 3),)),
    "scan": ("dynamo", Scan, lambda: (draw(2, 3), draw(5, 2, 3))),
    "cond, taken": ("dynamo", Cond, lambda: (draw(2, 3, offset=2.0),)),
    "cond, not taken": ("dynamo", Cond, lambda: (draw(2, 3, offset=-2.0),)),
    "for": ("script", lambda: Scripted(for_loop), lambda: (draw(2, 3),)),
    "while": ("script", lambda: Scripted(while_loop), lambda: (draw(2, 3),)),
    "while, no step": ("script", lambda: Scripted(while_loop), lambda: (draw(2, 3, offset=9.0),)),
    "if, taken": ("script", lambda: Scripted(branch), lambda: (draw(2, 3, offset=2.0),)),
    "if, not taken": ("script", lambda: Scripted(branch), lambda: (draw(2, 3, offset=-2.0),)),
    "if in for": ("script", lambda: Scripted(branch_in_loop), lambda: (draw(2, 3),)),
    "a list in for": ("script", lambda: Scripted(unrolled_by_hand), lambda: (draw(5, 2, 3),)),
}
KINDS = {  # what stands in the model; the newer exporter writes the steps of RNN out
    "RNN": "Tanh",
    "RNN, script": "RNN",
    "GRU": "GRU",
    "LSTM": "LSTM",
    "while_loop": "Loop",
    "scan": "Scan",
    "cond": "If",
    "for": "Loop",
    "while": "Loop",
    "if": "If",
    "if in for": "Loop",
    "a list in for": "Loop",
}


def exported(exporter, module, inputs):
    names = [f"in_{k}" for k in range(len(inputs))]
    if exporter == "dynamo":
        with contextlib.redirect_stdout(io.StringIO()):
            program = torch.onnx.export(module, inputs, dynamo=True, optimize=False, verbose=False, input_names=names)
        return program.model_proto
    file = io.BytesIO()
    if isinstance(module, Scripted):
        module = copy.deepcopy(module)
        module.function = torch.jit.script(module.function)
    torch.onnx.export(module, inputs, file, dynamo=False, do_constant_folding=False, input_names=names)
    return onnx.load_from_string(file.getvalue())


def autograd(module, inputs, cotangents):
    """The gradients in double, of the inputs and of the weights."""
    module, inputs = copy.deepcopy(module).double(), [x.double().requires_grad_() for x in inputs]
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((y * torch.from_numpy(dy).double()).sum() for y, dy in zip(outputs, cotangents, strict=True)).backward()
    found = {f"in_{k}": x.grad for k, x in enumerate(inputs)} | {n: p.grad for n, p in module.named_parameters()}
    return {name: np.zeros(()) if grad is None else grad.numpy() for name, grad in found.items()}


@functools.cache
def prepared_case(case):
    """The exported model, its feeds, cotangents among them, and autograd's gradients."""
    exporter, make, draw_inputs = CASES[case]
    torch.manual_seed(0)
    module, inputs = make(), draw_inputs()
    model = exported(exporter, module, inputs)
    with torch.no_grad():
        results = module(*inputs)
    rng = np.random.default_rng(0)
    shapes = [y.shape for y in (results if isinstance(results, tuple) else (results,))]
    cotangents = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    feeds = {f"in_{k}": x.numpy() for k, x in enumerate(inputs)}
    feeds |= {f"{v.name}_grad": dy for v, dy in zip(model.graph.output, cotangents, strict=True)}
    return model, feeds, autograd(module, inputs, cotangents)


@pytest.mark.parametrize("case", CASES)
def test_the_exporter_keeps_the_structure(case):
    model, _, expected = prepared_case(case)
    kind = "RNN, script" if case.startswith("RNN") and case.endswith("script") else case.split(",")[0]
    assert KINDS[kind] in {node.op_type for node in model.graph.node}
    assert {t.name for t in model.graph.initializer} >= {name for name in expected if not name.startswith("in_")}


@pytest.mark.parametrize("dialect", ["onnx", "ort"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_autograds(case, dialect):
    model, feeds, expected = prepared_case(case)
    wrt = list(expected)
    gradient = refgrad.gradient(model, wrt=wrt, dialect=dialect)
    for backend in {"numpy", "ort-cpu"} & set(available()):
        try:
            prepared = get_backend(backend).prepare(gradient)
        except BackendError as error:
            if dialect == "ort" and backend == "ort-cpu" and "com.microsoft" in str(error):
                continue  # stock onnxruntime has no training operators
            raise
        found = prepared.run({k: v for k, v in feeds.items() if k in {i.name for i in gradient.graph.input}})
        for (name, value), grad in zip(expected.items(), found.values(), strict=True):
            assert np.abs(grad - value).max() <= TOLERANCE * max(np.abs(value).max(), 1), (name, backend)
            assert value.any() == grad.any(), (name, backend)


@pytest.mark.parametrize("case", ["while_loop", "scan", "cond, taken"])
def test_the_older_exporter_has_no_control_flow_of_torch(case):
    """Where it learns to, the table gets a row."""
    _, make, draw_inputs = CASES[case]
    with pytest.raises(RuntimeError, match=r"jit\.trace a dynamo-optimized function"):
        exported("script", make(), draw_inputs())

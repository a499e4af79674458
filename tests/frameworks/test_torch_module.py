"""`refgrad.torch.Module`: an ONNX model as a layer of torch, against torch itself."""

from __future__ import annotations

import copy
import doctest
import gc
import importlib
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad.backends import available
from refgrad.errors import FeedError, InvalidModelError, OptionError, OutputFileError, UnknownNameError

torch = pytest.importorskip("torch")

from torch.nn.utils import prune  # noqa: E402

from refgrad.torch import Module  # noqa: E402

pytestmark = pytest.mark.torch

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
ROOT = Path(__file__).parents[2]
BACKENDS = [name for name in ("numpy", "ort-cpu") if name in available()]
on_each = pytest.mark.parametrize("backend", BACKENDS)


def parsed(text: str, **weights: np.ndarray) -> ModelProto:
    """A model with these initializers."""
    model = onnx.parser.parse_model(f"{HEAD} {text}" if text[0] != "<" else text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def perceptron(dtype: str = "float32", kind: str = "float") -> ModelProto:
    return parsed(
        f"mlp ({kind}[N, 3] x) => ({kind}[N, 2] y) {{ a = MatMul(x, first.weight) b = Add(a, first.bias) c = Tanh(b) "
        "y = MatMul(c, second.weight) }".replace("first.weight", "first_weight")
        .replace("first.bias", "first_bias")
        .replace("second.weight", "second_weight"),
        first_weight=drawn(3, 4, dtype=dtype),
        first_bias=drawn(4, dtype=dtype, seed=1),
        second_weight=drawn(4, 2, dtype=dtype, seed=2),
    )


def dotted(model: ModelProto) -> ModelProto:
    """The model with dots in the names of its weights, as torch's exporter writes them."""
    names = {name: name.replace("_", ".") for name in ("first_weight", "first_bias", "second_weight")}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    return model


@on_each
def test_weights_are_parameters_under_their_names(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    assert list(layer.state_dict()) == ["first.weight", "first.bias", "second.weight"]
    assert [name for name, _ in layer.named_parameters()] == ["first.weight", "first.bias", "second.weight"]
    assert layer.first.weight.shape == (3, 4)
    other = Module(dotted(perceptron()), backend=backend)
    with torch.no_grad():
        layer.first.bias += 1
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3)
    assert torch.equal(layer(x), other(x))
    assert not layer.training


@on_each
def test_the_gradient_is_that_of_torch(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    x = torch.randn(7, 3, requires_grad=True)
    w, b, v = (p.detach().clone().requires_grad_() for p in layer.parameters())
    truth = torch.tanh(x @ w + b) @ v
    out = layer(x)
    torch.testing.assert_close(out, truth)
    cotangent = torch.randn(7, 2)
    found = torch.autograd.grad(out, [x, *layer.parameters()], cotangent)
    for one, other in zip(found, torch.autograd.grad(truth, [x, w, b, v], cotangent), strict=True):
        torch.testing.assert_close(one, other)


@on_each
def test_derivatives_of_two_orders(backend: str) -> None:
    layer = Module(dotted(perceptron("float64", "double")), backend=backend)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


SEVERAL = parsed("""several (double[N, 3] x, double[N, 3] z, int64[N] i)
        => (double[N, 3] y, double[3] s, int64[N, 3] k, int64[N] j) {
    a = Mul(x, z) y = Sin(a) o = Constant<value = int64[1] {0}>() s = ReduceSum<keepdims = 0>(z, o) k = Cast<to = 7>(x)
    j = Add(i, i) }""")


@on_each
def test_several_inputs_and_outputs_by_place_and_by_name(backend: str) -> None:
    layer = Module(SEVERAL, trainable=False, backend=backend)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    z = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    i = torch.arange(2)
    y, s, k, j = layer(x, z=z, i=i)
    assert not k.requires_grad
    assert torch.equal(j, i + i)
    torch.testing.assert_close(s, z.sum(0))
    (y.sum() * s.prod()).backward()
    expected = torch.autograd.grad(torch.sin(x * z).sum() * z.sum(0).prod(), [x, z])
    torch.testing.assert_close([x.grad, z.grad], list(expected))
    y, s, *_ = layer(x, z, i)
    torch.testing.assert_close(torch.autograd.grad(s.sum(), z)[0], torch.ones(2, 3, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(lambda x, z: layer(x, z, i)[:2], (x, z))


@on_each
def test_tensors_that_are_not_contiguous_and_expanded_cotangents(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    x = torch.randn(3, 6).T.requires_grad_()
    layer(x).sum().backward()
    again = x.detach().contiguous().requires_grad_()
    layer(again).sum().backward()
    assert torch.equal(x.grad, again.grad)
    x = torch.randn(0, 3, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 3)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("float16", torch.float16), ("bfloat16", torch.bfloat16), ("double", torch.float64)]
)
@on_each
def test_other_floats(backend: str, kind: str, dtype: torch.dtype) -> None:
    model = parsed(f"g ({kind}[N, 3] x) => ({kind}[N, 3] y) {{ a = Mul(x, x) y = Neg(a) }}")
    layer = Module(model, trainable=False, backend=backend)
    x = torch.randn(2, 3).to(dtype).requires_grad_()
    try:
        layer(x).sum().backward()
    except refgrad.errors.BackendError:
        if kind == "bfloat16" and backend == "ort-cpu":
            pytest.skip("ONNX Runtime has no kernels of bfloat16 on the CPU")
        raise
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, (-2 * x).detach(), rtol=1e-2, atol=1e-2)


@on_each
def test_an_optimizer_trains_what_is_saved(backend: str, tmp_path: Path) -> None:
    onnx.save(dotted(perceptron()), tmp_path / "model.onnx")
    layer = Module(tmp_path / "model.onnx", backend=backend)
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    x, target = torch.randn(32, 3), torch.randn(32, 2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = ((layer(x) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    layer.save(tmp_path / "trained.onnx")
    assert (tmp_path / "trained.onnx").read_bytes() != (tmp_path / "model.onnx").read_bytes()
    onnx.checker.check_model(str(tmp_path / "trained.onnx"), full_check=True)
    again = Module(tmp_path / "trained.onnx", backend=backend)
    assert torch.equal(again(x), layer(x))
    with pytest.raises(OutputFileError, match=r"model\.onnx"):
        layer.save(tmp_path / "model.onnx")


def test_frozen_weights_are_constants() -> None:
    layer = Module(dotted(perceptron()), ["second.*"], backend="numpy")
    assert list(layer.state_dict()) == ["second.weight"]
    with pytest.raises(UnknownNameError, match="third"):
        Module(dotted(perceptron()), ["third.weight"], backend="numpy")
    assert not list(Module(perceptron(), trainable=False, backend="numpy").parameters())


def test_a_model_in_memory_stays_as_it_is() -> None:
    model = dotted(perceptron())
    before = model.SerializeToString()
    layer = Module(model, backend="numpy")
    with torch.no_grad():
        layer.second.weight.fill_(7)
    made = layer.to_onnx()
    assert model.SerializeToString() == before
    assert (refgrad.get_train_initializer(made)["second.weight"][0] == 7).all()


BATCH_NORM = """norm (float[N, 3, 4] x) => (float[N, 3, 4] y) {
    y = BatchNormalization<momentum = 0.9>(x, scale, shift, mean, var) }"""


def normalised(**settings) -> ModelProto:
    ones = np.ones(3, np.float32)
    return parsed(BATCH_NORM, scale=1.5 * ones, shift=0.2 * ones, mean=0.1 * ones, var=2 * ones)


@on_each
def test_batch_normalization_in_both_modes(backend: str) -> None:
    layer = Module(normalised(), ["scale", "shift"], backend=backend)
    peer = torch.nn.BatchNorm1d(3)
    state = {"weight": 1.5, "bias": 0.2, "running_mean": 0.1, "running_var": 2.0}
    for name, value in state.items():
        getattr(peer, name).data.fill_(value)
    assert set(layer.state_dict()) == {"scale", "shift", "mean", "var"}
    peer.eval()
    x = torch.randn(6, 3, 4)
    torch.testing.assert_close(layer(x), peer(x))
    layer.train()
    peer.train()
    for _ in range(3):
        x = torch.randn(6, 3, 4, requires_grad=True)
        same = x.detach().clone().requires_grad_()
        out, truth = layer(x), peer(same)
        torch.testing.assert_close(out, truth)
        cotangent = torch.randn(6, 3, 4)
        out.backward(cotangent)
        truth.backward(cotangent)
        torch.testing.assert_close(x.grad, same.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.mean, peer.running_mean)
    torch.testing.assert_close(layer.var, peer.running_var)
    torch.testing.assert_close(dict(layer.named_parameters())["scale"].grad, peer.weight.grad, rtol=1e-4, atol=1e-5)
    layer.eval()
    peer.eval()
    torch.testing.assert_close(layer(x), peer(x))
    saved = Module(layer.to_onnx(), ["scale"], backend=backend)
    torch.testing.assert_close(saved(x), peer(x))
    frozen = Module(normalised(), ["scale"], backend=backend, batch_norm="frozen").train()
    torch.testing.assert_close(frozen(x), Module(normalised(), ["scale"], backend=backend)(x))


DROPOUT = """drop (float[N, 40] x) => (float[N, 40] y) {
    r = Constant<value = float {0.25}>() d = Dropout(x, ratio) y = Mul(d, scale) }"""


@on_each
def test_dropout_follows_the_generator_of_torch(backend: str) -> None:
    model = parsed(DROPOUT, ratio=np.array(0.25, np.float32), scale=drawn(40))
    layer = Module(model, ["scale"], backend=backend)
    x = torch.ones(50, 40, requires_grad=True)
    torch.testing.assert_close(layer(x), x * layer.scale)
    layer.train()
    torch.manual_seed(3)
    one, other = layer(x), layer(x)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    assert torch.equal(layer(x), one)
    kept = one != 0
    assert 0.7 < kept.float().mean() < 0.8
    one.sum().backward()
    torch.testing.assert_close(x.grad, kept * layer.scale.detach() / 0.75)
    assert torch.equal(Module(model, ["scale"], backend=backend, dropout="off").train()(x), layer.eval()(x))


def test_a_body_with_batch_normalization_has_no_training_mode() -> None:
    model = parsed(
        """g (float[N, 3, 4] x, bool c) => (float[N, 3, 4] y) {
        y = If(c) <then_branch = t () => (float[N, 3, 4] u) { u = BatchNormalization(x, scale, shift, mean, var) },
                   else_branch = e () => (float[N, 3, 4] v) { v = Identity(x) }> }""",
        **{name: np.ones(3, np.float32) for name in ("scale", "shift", "mean", "var")},
    )
    layer = Module(model, ["scale"], backend="numpy")
    assert layer(torch.randn(2, 3, 4), torch.tensor(True)).shape == (2, 3, 4)
    with pytest.raises(OptionError, match="frozen"):
        layer.train()
    Module(model, ["scale"], backend="numpy", batch_norm="frozen").train()


@on_each
def test_what_is_kept_goes_when_autograd_lets_go(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    x = torch.randn(5, 3, requires_grad=True)
    out = layer(x)
    token = out.grad_fn.saved_tensors[0]
    alive = weakref.ref(token)
    del token
    gc.collect()
    assert alive() is not None
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    gc.collect()
    assert alive() is None
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@on_each
def test_a_change_before_the_backward_pass_is_told(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    out = layer(torch.randn(5, 3))
    with torch.no_grad():
        layer.second.weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    x = torch.randn(4, 3)
    one = layer(x).detach().clone()
    out = layer(x)
    with torch.no_grad():
        out.add_(1)
    assert torch.equal(layer(x), one)


@on_each
def test_weights_in_other_memory_are_read(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    x = torch.randn(4, 3)
    layer(x)
    layer.second.weight.data = torch.zeros(4, 2)
    assert not layer(x).any()
    layer.second.weight = torch.nn.Parameter(torch.ones(4, 2))
    assert layer(x).any()


@on_each
def test_copies_and_pickles(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    x = torch.randn(4, 3)
    expected = layer(x)
    expected.sum().backward()
    twin = copy.deepcopy(layer)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for other in (twin, pickle.loads(pickle.dumps(layer)), torch.load(stored, weights_only=False)):
        assert torch.equal(other(x), expected)
        with torch.no_grad():
            other.second.weight.zero_()
        assert not other(x).any()
    assert torch.equal(layer(x), expected)


@on_each
def test_transforms_of_torch(backend: str) -> None:
    layer = Module(dotted(perceptron("float64", "double")), backend=backend)
    x = torch.randn(4, 3, dtype=torch.float64)
    w, b, v = (p.detach() for p in layer.parameters())

    def truth(x):
        return (torch.tanh(x @ w + b) @ v).sum()

    def ours(x):
        return layer(x).sum()

    torch.testing.assert_close(torch.func.grad(ours)(x), torch.func.grad(truth)(x))
    rows = torch.func.vmap(torch.func.grad(lambda row: ours(row[None])))(x)
    torch.testing.assert_close(rows, torch.func.grad(truth)(x))
    torch.testing.assert_close(torch.autograd.functional.hessian(ours, x), torch.autograd.functional.hessian(truth, x))


@on_each
def test_vmap_of_what_has_no_derivative(backend: str) -> None:
    """Neither an input nor an output is a float, or no output is."""
    largest = Module(
        parsed("g (float[N, 3] x) => (int64[N] i) { i = ArgMax<axis = 1, keepdims = 0>(x) }"), False, backend=backend
    )
    x = torch.randn(4, 2, 3)
    assert torch.equal(torch.vmap(largest)(x), x.argmax(-1))
    assert torch.equal(torch.func.grad(lambda x: x.sum() + largest(x).sum())(x[0]), torch.ones(2, 3))
    rows = Module(
        parsed("g (int64[N] i) => (float[N, 3] y) { y = Gather(w, i) }", w=drawn(5, 3)), False, backend=backend
    )
    i = torch.tensor([[0, 1], [4, 2]])
    torch.testing.assert_close(torch.vmap(rows)(i), torch.tensor(drawn(5, 3))[i])


@on_each
def test_a_lost_weight_is_named(backend: str) -> None:
    layer = Module(parsed(LINE, w=drawn(3, 3)), backend=backend)
    del layer.w
    with pytest.raises(FeedError, match="lost 'w'"):
        layer(torch.randn(2, 3))


LINE = "g (float[N, 3] x) => (float[N, 3] y) { y = MatMul(x, w) }"


@on_each
def test_weights_that_lie_otherwise_in_memory(backend: str) -> None:
    layer = Module(parsed(LINE, w=drawn(3, 3)), backend=backend)
    x = torch.randn(2, 3)
    layer(x)
    layer.w.data = layer.w.data.t()
    for _ in range(2):
        torch.testing.assert_close(layer(x), x @ layer.w)
        with torch.no_grad():
            layer.w.add_(1)
    layer.w.data = layer.w.data[:2]
    with pytest.raises(FeedError, match="3 elements on axis 0"):
        layer(x)


@on_each
def test_vmap_of_every_kind(backend: str) -> None:
    layer = Module(
        parsed("g (float[N, 3] x) => (float[N, 3] y) { a = Mul(x, w) y = Tanh(a) }", w=drawn(3)), backend=backend
    )
    x = torch.randn(4, 3, requires_grad=True)
    torch.vmap(layer)(x[:, None]).sum().backward()
    by_rows, x.grad = x.grad, None
    layer(x).sum().backward()
    torch.testing.assert_close(by_rows, x.grad)
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(layer)(x[:, None])[:, 0], layer(x))
    weights = torch.randn(5, 3)
    many = torch.vmap(lambda w: torch.func.functional_call(layer, {"w": w}, (x,)))(weights)
    torch.testing.assert_close(many, torch.tanh(x * weights[:, None]))


@pytest.mark.parametrize(
    ("text", "fed"),
    [
        ("g (float[N, 3] x, int64[1] k) => (float[N, 1] y, int64[N, 1] i) { y, i = TopK(x, k) }", [torch.tensor([1])]),
        (
            "g (float[N, 3] x, float c) => (float[N, 3] y, bool[N, 3] i) { i = Greater(x, c) y = Where(i, x, c) }",
            [torch.tensor(0.0)],
        ),
    ],
)
@on_each
def test_a_changed_result_that_the_backward_pass_reads_is_told(backend: str, text: str, fed: list) -> None:
    layer = Module(parsed(text), trainable=False, backend=backend)
    y, i = layer(torch.randn(4, 3, requires_grad=True), *fed)
    i.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_each
def test_a_changed_result_that_nothing_reads_may_change(backend: str) -> None:
    net = torch.nn.Sequential(Module(parsed(LINE, w=drawn(3, 3)), backend=backend), torch.nn.ReLU(inplace=True))
    x = torch.randn(4, 3, requires_grad=True)
    net(x).sum().backward()
    w = net[0].w.detach()
    torch.testing.assert_close(x.grad, ((x.detach() @ w) > 0).float() @ w.T)


@on_each
def test_results_have_memory_of_their_own(backend: str) -> None:
    layer = Module(
        parsed("g (float[N] x, float[N] c) => (float[N] y, float[N] d) { y = Add(x, c) d = Identity(y) }"),
        trainable=False,
        backend=backend,
    )
    x, c = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y, d = layer(x, c)
    with torch.no_grad():
        d.add_(100)
    assert (y < 50).all()
    y.sum().backward()
    assert x.grad.data_ptr() != c.grad.data_ptr()


def test_random_numbers_have_one_derivative_alone() -> None:
    layer = Module(
        parsed("g (float[N] x) => (float[N] y) { u = RandomUniformLike(x) y = Mul(x, u) }"),
        trainable=False,
        backend="numpy",
    )
    x = torch.randn(5, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] * x, y)
    with pytest.raises(OptionError, match="random numbers"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@on_each
def test_weights_that_torch_computes(backend: str) -> None:
    layer = prune.l1_unstructured(Module(parsed(LINE, w=drawn(3, 3)), backend=backend), "w", 4)
    x = torch.randn(2, 3)
    assert int((layer.w == 0).sum()) == 4
    torch.testing.assert_close(layer(x), x @ layer.w)
    layer(x).sum().backward()
    assert layer.w_orig.grad is not None


@on_each
def test_hooks_of_saved_tensors(backend: str) -> None:
    layer = Module(parsed(LINE, w=drawn(3, 3)), backend=backend)
    x = torch.randn(2, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2, 3) @ layer.w.detach().T)


@on_each
def test_batch_normalizations_one_after_the_other(backend: str) -> None:
    """ONNX Runtime writes over the running statistics that a node reads."""
    values = {name: np.full(3, 0.3 * k, np.float32) for k, name in enumerate(("s", "b", "m", "v", "m2", "v2"), 1)}
    model = parsed(
        """g (float[N, 3] x) => (float[N, 3] y) {
        a = BatchNormalization(x, s, b, m, v) y = BatchNormalization(a, s, b, m2, v2) }""",
        **values,
    )
    layer = Module(model, ["s", "b"], backend=backend).train()
    peers = [torch.nn.BatchNorm1d(3) for _ in range(2)]
    for peer, (mean, var) in zip(peers, (("m", "v"), ("m2", "v2")), strict=True):
        state = {"weight": "s", "bias": "b", "running_mean": mean, "running_var": var}
        peer.load_state_dict({key: torch.tensor(values[name]) for key, name in state.items()}, strict=False)
    net = torch.nn.Sequential(*peers)
    for _ in range(3):
        x = torch.randn(6, 3)
        torch.testing.assert_close(layer(x), net(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([layer.m, layer.v], [peers[0].running_mean, peers[0].running_var])
    torch.testing.assert_close(
        [layer.m2, layer.v2], [peers[1].running_mean, peers[1].running_var], rtol=1e-4, atol=1e-5
    )


def test_recomputation_gives_the_same() -> None:
    layer = Module(dotted(perceptron()), backend="numpy")
    less = Module(dotted(perceptron()), backend="numpy", recompute=True)
    x = torch.randn(4, 3)
    one = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    other = torch.autograd.grad(less(x).sum(), list(less.parameters()))
    torch.testing.assert_close(one, other)


def test_the_kink_of_torch() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = Abs(x) }")
    x = torch.zeros(2, requires_grad=True)
    Module(model, trainable=False, backend="numpy")(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(2))


def test_linear_models_of_scikit_learn_are_trained_and_saved() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15, "ai.onnx.ml": 1]>
        line (float[N, 2] x) => (float[N, 1] y) {
            y = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0], intercepts = [3.0]> (x) }""")
    layer = Module(model, backend="numpy")
    assert len(list(layer.parameters())) == 2
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    made = layer.to_onnx()
    attributes = {a.name: list(a.floats) for a in made.graph.node[0].attribute if a.floats}
    assert attributes["coefficients"] == [2, 4]
    assert attributes["intercepts"] == [6]


@on_each
def test_bad_input_is_named_before_anything_runs(backend: str) -> None:
    layer = Module(dotted(perceptron()), backend=backend)
    for tensors, named, said in (
        ((), {}, "No tensor for x"),
        ((torch.randn(2, 3), torch.randn(2)), {}, "1 inputs"),
        ((), {"z": torch.randn(2, 3)}, "no input 'z'"),
        ((torch.randn(2, 3),), {"x": torch.randn(2, 3)}, "given twice"),
        ((np.zeros((2, 3), np.float32),), {}, "tensor of torch"),
        ((torch.randn(2, 3).double(),), {}, "torch.float64"),
        ((torch.randn(2, 4),), {}, "3 elements on axis 1"),
        ((torch.randn(3),), {}, "rank 2"),
        ((torch.randn(2, 3, device="meta"),), {}, "on meta"),
    ):
        with pytest.raises(FeedError, match=said):
            layer(*tensors, **named)
    layer.double()
    with pytest.raises(FeedError, match=r"Parameter first\.weight: float32"):
        layer(torch.randn(2, 3))


def test_weights_in_constants_and_bodies_are_parameters_and_are_saved_there(tmp_path: Path) -> None:
    model = parsed(
        """g (float[N, 2] x) => (float[N, 2] y) { w = Constant<value = float[2, 2] {1, 2, 4, 3}>() h = MatMul(x, w)
        t = Constant<value = bool {1}>()
        y = If(t) <then_branch = a () => (float[N, 2] p) { b = Constant<value = float[2] {1, 3}>() p = Add(h, b) },
            else_branch = c () => (float[N, 2] q) { q = Identity(h) }> }"""
    )
    onnx.save(model, tmp_path / "g.onnx")
    layer = Module(tmp_path / "g.onnx", backend="numpy")
    assert [name for name, _ in layer.named_parameters()] == ["w", "b"]
    layer(torch.ones(3, 2)).sum().backward()
    assert layer.get_parameter("w").grad.tolist() == [[3, 3], [3, 3]]
    assert layer.get_parameter("b").grad.tolist() == [3, 3]
    with torch.no_grad():
        layer.get_parameter("w").mul_(2)
    saved = layer.to_onnx()
    assert [node.op_type for node in saved.graph.node] == ["Constant", "MatMul", "Constant", "If"]
    assert numpy_helper.to_array(saved.graph.node[0].attribute[0].t).tolist() == [[2, 4], [8, 6]]


def test_models_that_are_no_layers() -> None:
    with pytest.raises(InvalidModelError, match="Input 's' is string"):
        Module(parsed("g (string[N] s, float[N] x) => (float[N] y) { y = Neg(x) }"), trainable=False, backend="numpy")
    sequence = parsed("g (float[N] x) => (seq(float[N]) y) { y = SequenceConstruct(x, x) }")
    with pytest.raises(InvalidModelError, match="Output 'y' is a sequence"):
        Module(sequence, trainable=False, backend="numpy")
    two = parsed("g (float[N] x) => (float[N] y, string[N] t) { y = Neg(x) t = Cast<to = 8>(x) }")
    assert Module(two, trainable=False, outputs=["y"], backend="numpy")(torch.ones(2)).shape == (2,)
    with pytest.raises(UnknownNameError, match="Nothing is trainable"):
        Module(parsed("g (float[N] x) => (float[N] y) { y = Neg(x) }"), backend="numpy")
    for option in ("batch_norm", "dropout", "kinks", "quantization"):
        with pytest.raises(OptionError, match="there are"):
            Module(perceptron(), backend="numpy", **{option: "x"})
    with pytest.raises(InvalidModelError, match="There is no file"):
        Module("nothing.onnx", backend="numpy")


@pytest.mark.skipif("ort-cpu" not in BACKENDS, reason="onnxruntime is not installed")
def test_options_of_the_session() -> None:
    layer = Module(
        perceptron(), backend="ort-cpu", options={"threads": 1, "config": {"session.disable_prepacking": "1"}}
    )
    assert layer(torch.randn(2, 3)).shape == (2, 2)
    with pytest.raises(OptionError, match="provider_options and data_folders"):
        Module(perceptron(), backend="ort-cpu", options={"speed": 3})(torch.randn(2, 3))


def test_an_input_of_unknown_rank() -> None:
    def model(nodes: list[onnx.NodeProto], shape: list[int] | None) -> ModelProto:
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
        graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    nodes = [helper.make_node("Exp", ["x"], ["e"]), helper.make_node("ReduceSum", ["e"], ["y"], keepdims=0)]
    layer = Module(model(nodes, []), trainable=False, backend="numpy")
    for shape in ((), (2,), (2, 3)):
        x = torch.randn(shape, requires_grad=True)
        layer(x).backward()
        torch.testing.assert_close(x.grad, x.detach().exp())
    layer = Module(model([helper.make_node("Exp", ["x"], ["y"])], None), trainable=False, backend="numpy")
    assert layer(torch.zeros(2, 3)).shape == (2, 3)
    with pytest.raises(InvalidModelError, match="Output 'y' declares no shape"):
        layer(torch.zeros(2, 3, requires_grad=True))


def test_without_torch_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None
try:
    import refgrad.torch
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refgrad.torch needs torch. Install it: pip install '.[torch]' in a checkout of refgrad.\n"


def test_the_examples_of_docstrings_run() -> None:
    failed, count = doctest.testmod(importlib.import_module("refgrad.torch.module"))
    assert count > 3
    assert not failed


@pytest.mark.skipif("ort-cpu" not in BACKENDS, reason="onnxruntime is not installed")
def test_the_page_runs_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, count = doctest.testfile(str(ROOT / "docs" / "torch.md"), module_relative=False)
    assert count > 20
    assert not failed
    assert (tmp_path / "trained.onnx").exists()


@pytest.mark.skipif(not torch.cuda.is_available() or "ort-cuda" not in available(), reason="there is no GPU")
def test_on_cuda() -> None:
    layer = Module(dotted(perceptron()), backend="ort-cuda").cuda()
    peer = Module(dotted(perceptron()), backend="numpy")
    x = torch.randn(5, 3)
    torch.testing.assert_close(layer(x.cuda()).cpu(), peer(x), rtol=1e-3, atol=1e-3)
    layer(x.cuda()).sum().backward()
    peer(x).sum().backward()
    torch.testing.assert_close(layer.first.weight.grad.cpu(), peer.first.weight.grad, rtol=1e-2, atol=1e-2)
    with pytest.raises(FeedError, match="on cpu"):
        layer(x)

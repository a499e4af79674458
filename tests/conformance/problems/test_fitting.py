"""Random feeds with which a model runs: sizes that fit, and integers that mean something."""

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import ModelProto, numpy_helper

from refgrad import interruption
from refgrad.backends import get_backend
from refgrad.conformance import check, nonfinite
from refgrad.conformance.judge import check as judge
from refgrad.conformance.problems.fitting import fitting_feeds
from refgrad.errors import FeedError
from refgrad.walks.walk import walk

pytestmark = pytest.mark.interpreter


def model_of(text: str, **weights: tuple[int, ...]) -> ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {text}')
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    return model


def fed(model: ModelProto, **options: Any) -> dict[str, np.ndarray]:
    run = get_backend("numpy").prepare(model).run
    return fitting_feeds(model, run, lambda out: all(np.isfinite(v).all() for v in out.values()), **options).feeds


SKIPS = model_of(
    """(float[N,3,H,W] x) => (float[N,4,H,W] y) <float[4] up = {1, 1, 2, 2}> {
    a = Conv<strides=[2,2],pads=[1,1,1,1]>(x, k) b = Conv<strides=[2,2],pads=[1,1,1,1]>(a, l)
    c = Conv<strides=[2,2],pads=[1,1,1,1]>(b, l) d = Resize(c, , up) e = Concat<axis=1>(d, b) f = Resize(e, , up)
    z = Concat<axis=1>(f, a) s = Resize(z, , up) y = Conv(s, m) }""",
    k=(4, 3, 3, 3),
    l=(4, 4, 3, 3),
    m=(4, 12, 1, 1),
)
WINDOWS = model_of(
    """(float[N,3,H,W] x) => (float[N,4] y) { a = Conv<strides=[2,2]>(x, k) b = MaxPool<kernel_shape=[3,3],strides=[2,2]>(a)
    c = Conv<strides=[2,2]>(b, l) p = GlobalAveragePool(c) y = Flatten(p) }""",
    k=(4, 3, 7, 7),
    l=(4, 4, 3, 3),
)
RESHAPE = model_of(
    "(float[N,8] x) => (float[1,4] y) <int64[2] s = {1, 8}> { f = Reshape(x, s) y = MatMul(f, w) }", w=(8, 4)
)
FORMULA = model_of(
    """(float[N,P,2] old, float[N,S,2] new, float[N,"P + S"] bias) => (float[N,T] y) {
    c = Concat<axis=1>(old, new) r = ReduceSum<keepdims=0>(c, axes) y = Add(r, bias) }"""
)
FORMULA.graph.initializer.append(numpy_helper.from_array(np.array([2]), "axes"))

STATE = model_of(
    """(float[?,?] x, float[2,?,3] state) => (float[3,?,3] y) {
    a = MatMul(x, w) b = Unsqueeze(a, first) y = Concat<axis=0>(b, state) }""",
    w=(8, 3),
)
STATE.graph.initializer.append(numpy_helper.from_array(np.array([0]), "first"))


@pytest.mark.parametrize(
    ("model", "shape"), [(SKIPS, (1, 3, 8, 8)), (WINDOWS, (1, 3, 32, 32)), (RESHAPE, (1, 8)), (FORMULA, (4, 4, 2))]
)
def test_sizes_are_tried_until_the_model_runs(model: ModelProto, shape: tuple[int, ...]) -> None:
    feeds = fed(model)
    assert next(iter(feeds.values())).shape == shape
    assert check(model, backends=["numpy"], dialects=["onnx"]).ok
    assert walk(model).steps
    assert nonfinite(model).ok


def test_an_unknown_axis_of_a_state_counts_samples_if_it_cannot_count_steps() -> None:
    assert {name: array.shape for name, array in fed(STATE).items()} == {"x": (1, 8), "state": (2, 1, 3)}
    steps = model_of("(float[1,?,3] x) => (float[1,?,3] y) { y = Relu(x) }")
    assert fed(steps)["x"].shape == (1, 4, 3)


def test_of_large_samples_one_is_drawn() -> None:
    image = model_of("(float[N,3,100,100] x) => (float[N,3,100,100] y) { y = Relu(x) }")
    assert fed(image)["x"].shape == (1, 3, 100, 100)
    assert fed(image, size=2)["x"].shape == (2, 3, 100, 100)
    small = model_of("(float[N,3,10,10] x) => (float[N,3,10,10] y) { y = Relu(x) }")
    assert fed(small)["x"].shape == (4, 3, 10, 10)


def test_sizes_that_are_given_are_kept() -> None:
    assert fed(SKIPS, sizes={"H": 16, "W": 24, "N": 2})["x"].shape == (2, 3, 16, 24)
    assert fed(SKIPS, sizes={"H": 16, "W": 16})["x"].shape == (4, 3, 16, 16)
    assert fed(SKIPS, size=16)["x"].shape == (16, 3, 16, 16)


def test_an_axis_is_called_by_its_input() -> None:
    found = fed(STATE, sizes={"x[0]": 5, "state[1]": 5})
    assert found["x"].shape[0] == 5
    assert found["state"].shape == (2, 5, 3)
    with pytest.raises(
        FeedError, match=r"No input has a dimension 'x\[2\]'.*Any axis without a size may be given as 'x\[0\]'"
    ):
        fed(STATE, sizes={"x[2]": 5})


def test_a_model_that_runs_at_no_size_says_what_to_give() -> None:
    model = model_of("(float[N,T] x) => (float[3,5] y) <int64[2] s = {3, 5}> { y = Reshape(x, s) }")
    with pytest.raises(FeedError, match=r"none of the sizes .*from 4 to .* sizes=\{\.\.\.\}, or the inputs with feeds"):
        fed(model)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            model_of("(int64[N,T] ids) => (float[N,T,2] y) { y = Gather(table, ids) }", table=(50, 2)),
            lambda feeds: feeds["ids"].max() > 1 and feeds["ids"].max() < 50,
        ),
        (
            model_of("(int64[N,T] position_ids) => (float[N,T,2] y) { y = Gather(table, position_ids) }", table=(3, 2)),
            lambda feeds: (feeds["position_ids"] == [0, 1, 2, 0]).all(),
        ),
        (
            model_of("""(float[N,T] x, int64[N,T] attention_mask) => (float[N,T] y) {
            m = Cast<to=1>(attention_mask) y = Mul(x, m) }"""),
            lambda feeds: feeds["attention_mask"].all(),
        ),
        (
            model_of("(float[T,N,3] x, int32[N] ends) => (float[T,1,N,4] y) { y = LSTM<hidden_size=4>(x, w, r, , ends) }",
                     w=(1, 16, 3), r=(1, 16, 4)),
            lambda feeds: (feeds["ends"] == 4).all(),
        ),
        (
            model_of("""(float[N] x, int64 rate) => (float[N] y) { k = Constant<value_int=16000>() c = Equal(rate, k)
            n = Neg(x) y = Where(c, x, n) }"""),
            lambda feeds: feeds["rate"] == 16000,
        ),
        (
            model_of("""(int64[N,T] bytes) => (float[N,T,5] y) <int64[1] last = {-1}, int64[5] all = {0, 1, 2, 3, 4}> {
            u = Unsqueeze(bytes, last) c = Equal(u, all) y = Cast<to=1>(c) }"""),
            lambda feeds: set(feeds["bytes"].ravel().tolist()) >= {2, 3, 4},
        ),
        (
            model_of("(float[N] x, int64[N] labels) => (float[N] y) { m = Cast<to=1>(labels) y = Mul(x, m) }"),
            lambda feeds: set(feeds["labels"].tolist()) <= {0, 1},
        ),
    ],
    ids=["ids", "positions", "mask", "lengths", "rate", "classes", "others"],
)  # fmt: skip
def test_integers_are_what_the_model_takes_them_for(model: ModelProto, expected: Any) -> None:
    feeds = fed(model)
    assert expected(feeds)
    assert all(np.array_equal(feed, again) for feed, again in zip(feeds.values(), fed(model).values(), strict=True))


def test_a_check_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("(float[N,2] x) => (float[N,2] y) { y = Tanh(x) }")
    ran, every = [], judge._on_backend

    def stop(*given: Any) -> Any:
        if ran:
            raise interruption.OutOfTime("over")
        ran.append(given[2])
        return every(*given)

    monkeypatch.setattr(judge, "_on_backend", stop)
    found = check(model, backends=["numpy"], dialects=["onnx", "ort"])
    assert (found.ok, found.stopped) == (True, "out of time")
    assert found.skipped == ("dialect ort on numpy, out of time",)
    assert {(row.dialect, row.oracle) for row in found.rows} >= {("onnx", "float64"), ("onnx", "differences")}

"""The answer of a check in one sentence."""

from refgrad.conformance import Check, Row


def answer(*rows, wrt=("x",)):
    return Check(wrt, ("y",), 0, "your own", rows).answer


def by_differences(verdict="right", name="x", dialect="onnx"):
    return Row(name, dialect, "numpy float64", "differences", verdict, 1e-9, 1e-9, 1e-6)


def on(executor, verdict, error=1e-7, name="x"):
    return Row(name, "onnx", executor, "float64", verdict, error, error, 1e-6)


def test_a_gradient_is_right_if_one_executor_computes_it_and_another_computes_another_function():
    found = answer(by_differences(), on("numpy", "right"), on("ort-cpu", "undecided", error=0.5))
    assert found == ("right", "1 gradient on 1 executor, largest error 1e-07, within rounding; undecided on 'ort-cpu'")


def test_a_gradient_that_no_executor_computes_is_undecided():
    assert answer(by_differences(), on("numpy", "undecided"), on("ort-cpu", "undecided"))[0] == "undecided"
    assert answer(by_differences(), on("numpy", "not supported"), on("ort-cpu", "undecided"))[0] == "undecided"


def test_a_gradient_that_no_executor_supports_is_right_in_float64():
    assert answer(by_differences(), on("ort-cpu", "not supported"))[1].startswith("1 gradient in float64")


def test_a_gradient_that_no_difference_confirms_is_undecided():
    assert answer(by_differences("undecided"), on("numpy", "right"))[0] == "undecided"
    assert answer(by_differences(), by_differences("undecided", dialect="ort"), on("numpy", "right"))[0] == "undecided"


def test_an_error_on_one_executor_counts_more_than_another_that_is_right():
    assert answer(by_differences(), on("numpy", "right"), on("ort-cpu", "wrong"))[0] == "wrong"
    assert answer(by_differences(), on("numpy", "right"), on("ort-cpu", "crashed"))[0] == "crashed"


def test_only_some_may_be_right():
    rows = [by_differences(), on("numpy", "right"), by_differences(name="w"), on("numpy", "undecided", name="w")]
    word, what = answer(*rows, wrt=("x", "w"))
    assert word == "right"
    assert what.startswith("1 of 2 gradients on 1 executor")
    assert what.endswith("undecided: w")

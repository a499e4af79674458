"""Every independent forward is that of its operator: the complex step and the reference would only be silent of another one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from registering import forgetting

from refgrad.cli import main
from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.oracles import analytic, forwards
from refgrad.conformance.tools.coverage import report
from refgrad.extend import case, forward, kernel, rule

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]


@cache
def _compared() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = defaultdict(list)
    for one in forwards.few(tables(), 6):
        found[one.operator].append(one)
    return found


@pytest.mark.parametrize("operator", sorted(analytic.FORWARDS))
def test_a_forward_is_that_of_the_kernel(operator: str) -> None:
    said = [forwards.fault(one) for one in _compared()[operator]]
    assert "" in said, "no case compares it"
    assert not [why for why in said if why]


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "another function": (lambda node, x: x / (2 + abs(x)), "of the largest element for 'output' on complex numbers"),
    "a wrong shape": (lambda node, x: x[..., None], "returned shape"),
    "None": (lambda node, x: None, "returned None and not an array"),
    "a list": (lambda node, x: [x], "returned a list and not an array"),
    "integers": (lambda node, x: np.zeros(x.shape, np.int64), "returned int64 and not a float"),
    "nothing at all": (lambda node, x: (), "returned 0 outputs, and the node names 1"),
    "an exception": (lambda node, x: {}["k"], "raised KeyError: 'k' ("),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_forward_is_named_with_the_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, message = WRONG[kind]
    monkeypatch.setitem(analytic.FORWARDS, "Softsign", function)
    why = forwards.fault(_compared()["Softsign"][0])
    assert why is not None
    assert message in why
    assert "Softsign: the independent forward" in why
    assert "its kernel refgrad.backends.numpy.kernels.activation." in why
    assert message in report("Softsign")


MODULE = """
import numpy as np
from refgrad.extend import case, forward, kernel, rule

@rule("Triple", domain="wrong.forward")
def triple(op, d_y, x):
    "dx = 3·dy"
    return op.Mul(d_y, 3.0)

@kernel("Triple", domain="wrong.forward")
def in_numpy(x):
    return 3 * x

@forward("Triple", domain="wrong.forward")
def again(x):
    return 4 * x

@case("Triple", domain="wrong.forward")
def cases(make):
    yield make(np.ones(3, np.float32))
"""


def test_the_suite_exits_with_1_where_a_forward_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong_forward.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with forgetting():
        code = main(["--import", "wrong_forward", "conformance", "run", "--ops", "wrong.forward.Triple"])
    said = capsys.readouterr().out
    assert code == 1
    assert "wrong.forward.Triple: the independent forward wrong_forward.again (" in said
    assert "differs by 0.33 of the largest element for 'y' on numbers in double" in said
    assert "its kernel wrong_forward.in_numpy (" in said


@pytest.fixture
def _forgotten() -> Iterator[None]:
    with forgetting():
        yield


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("analytic_too", [True, False])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x, t: x * x, "of the largest element for 'y' on numbers in double"),
        (lambda x, t: None, "returned None"),
        (lambda x, t: 1 / 0, "raised ZeroDivisionError: division by zero ("),
    ],
)
def test_the_forward_of_a_package_is_compared(body: Callable[..., Any], message: str, analytic_too: bool) -> None:
    @rule("SH", domain="b.domain")
    def _rule(op: Any, d_y: str, x: str, t: str) -> Any:
        """dx = t·dy, dt = x·dy"""
        return op.Mul(d_y, t), op.Mul(d_y, x)

    @kernel("SH", domain="b.domain")
    def _kernel(x: np.ndarray, t: np.ndarray) -> np.ndarray:
        return x * t

    @case("SH", domain="b.domain")
    def _cases(make: Any) -> Iterator[Any]:
        yield make(np.ones(3, np.float32), np.full(3, 2, np.float32))

    forward("SH", domain="b.domain", analytic=analytic_too)(body)
    assert message in report("b.domain.SH")
    assert "independent forward: b.domain.SH: the independent forward" in report("b.domain.SH")

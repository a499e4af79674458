"""An operator has everything that every operator has, or a reason; what it lacks is one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import one_operator
import onnx.parser
import pytest
from registering import forgetting

from refgrad import traits
from refgrad.backends import get_backend
from refgrad.backends.numpy import registry as kernels
from refgrad.conformance.case import Case
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.oracles import analytic
from refgrad.conformance.strategies import drawing
from refgrad.conformance.tools import coverage as module
from refgrad.conformance.tools.coverage import ASPECTS, gaps, idle_reasons, read_reasons, report
from refgrad.conformance.tools.jets import points
from refgrad.errors import BackendError, RecordsError, UnknownNameError
from refgrad.extend import case, forward, kernel, rule, strategy
from refgrad.tables.operators import operators
from refgrad.tables.registry import RULES

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("operator", [one.operator for one in operators() if one.derivative not in ("zero", "none")])
def test_an_operator_lacks_nothing(operator: str) -> None:
    said = report(operator)
    assert not said, said


def test_every_reason_is_needed() -> None:
    assert idle_reasons() == []


@pytest.fixture
def _again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted is counted again."""
    monkeypatch.setattr(module, "_tables", cache(module._tables.__wrapped__))


def _leaving_out(patch: pytest.MonkeyPatch, left_out: Callable[[Case], bool]) -> None:
    def others(operators: list[str]) -> Iterator[Case]:
        return (case for case in tables(operators) if case.operator != "Softsign" or not left_out(case))

    patch.setattr(module, "tables", others)


def _without_rule(patch: pytest.MonkeyPatch) -> None:
    patch.delitem(RULES, ("", "Softsign"))


def _without_kernel(patch: pytest.MonkeyPatch) -> None:
    kernels.kernels()
    patch.delitem(kernels._kernels, ("", "Softsign"))
    patch.setattr(module, "_has_body", lambda domain, op_type: False)


def _without_cases(patch: pytest.MonkeyPatch) -> None:
    _leaving_out(patch, lambda case: case.values == "smooth")


def _without_types(patch: pytest.MonkeyPatch) -> None:
    _leaving_out(patch, lambda case: case.static and case.values == "smooth")


def _without_special_values(patch: pytest.MonkeyPatch) -> None:
    _leaving_out(patch, lambda case: case.values != "smooth")


def _without_strategy(patch: pytest.MonkeyPatch) -> None:
    assert "Softsign" in module.strategies.operators()
    patch.delitem(drawing.REGISTRY, "Softsign")


def _without_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(analytic, "KNOWN", analytic.KNOWN - {"Softsign"})
    patch.delitem(analytic.FORWARDS, "Softsign")
    patch.setattr(module, "_rows_of_torch", lambda: frozenset())
    patch.setattr(module, "_has_body", lambda domain, op_type: False)


def _without_points(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(points, "POINTS", tuple(point for point in points.POINTS if point.operator != "Softsign"))


def _without_traits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(traits, "KINDS", tuple(kind - {"Softsign"} for kind in traits.KINDS))


def _without_docs(patch: pytest.MonkeyPatch, folder: Path) -> None:
    text = module._DOCS.read_text(encoding="utf-8")
    page = folder / "operators.md"
    page.write_text("\n".join(line for line in text.splitlines() if "| Softsign |" not in line), encoding="utf-8")
    patch.setattr(module, "_DOCS", page)


PLANTED: dict[str, tuple[Callable[..., None], str]] = {
    "kernel": (
        _without_kernel,
        "kernel: none, so the interpreter cannot run it (backends/numpy/kernels/activation.py)",
    ),
    "cases": (_without_cases, "cases: none (conformance/cases/activation.py)"),
    "types": (_without_types, "types: no smooth case of floats that declares every size"),
    "special values": (_without_special_values, "no row SPECIAL of numbers that are infinite, missing or extreme"),
    "strategy": (_without_strategy, "strategy: none (conformance/strategies/activation.py)"),
    "independent forward": (
        _without_forward,
        "(conformance/oracles/analytic.py, or a row in conformance/oracles/tables",
    ),
    "special points": (_without_points, "(conformance/tools/jets/elementwise.py, tensors.py or points.py)"),
    "traits": (_without_traits, "traits: it is of no kind (refgrad/traits.py)"),
    "docs": (_without_docs, "docs: no row in docs/operators.md (python docs/generate.py writes it)"),
}


@pytest.mark.usefixtures("_again")
@pytest.mark.parametrize("aspect", PLANTED)
def test_what_is_taken_away_is_lacking(aspect: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_away, message = PLANTED[aspect]
    take_away(monkeypatch, tmp_path) if aspect == "docs" else take_away(monkeypatch)
    assert [gap.aspect for gap in gaps("Softsign")] == [aspect]
    assert message in report("Softsign")


def test_without_a_rule_the_formula_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_rule(monkeypatch)
    [gap] = gaps("Softsign")
    assert (gap.aspect, gap.what, gap.where) == ("formula", "no rule", "refgrad/rules/activation.py")


@pytest.mark.usefixtures("_again")
def test_one_message_says_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for take_away in (_without_kernel, _without_strategy, _without_forward):
        take_away(monkeypatch)
    lines = report("Softsign").splitlines()
    assert lines[0] == "Softsign lacks:"
    assert [line.partition(":")[0] for line in lines[1:-1]] == ["- kernel", "- strategy", "- independent forward"]
    assert "coverage.toml" in lines[-1]


def test_an_operator_of_a_package_is_told_what_it_lacks() -> None:
    with forgetting():

        @rule("Cubed", domain="my.domain")
        def cubed(op: Any, d_y: str, x: str) -> Any:
            """dx = 3·x²·dy"""
            return op.Mul(op.Mul(op.Mul(x, x), 3.0), d_y)

        aspects = [gap.aspect for gap in gaps("my.domain.Cubed")]
        assert aspects == ["kernel", "cases", "strategy", "independent forward"]
        assert {gap.where.partition(",")[0] for gap in gaps("my.domain.Cubed")} == {cubed.__module__}
        kernel("Cubed", domain="my.domain")(lambda x: x**3)
        forward("Cubed", domain="my.domain")(lambda x: x * x * x)
        strategy("Cubed", domain="my.domain")(lambda d: d.case(d.floats(d.shape())))
        case("Cubed", domain="my.domain")(lambda make: [make(np.ones(2, np.float32))])
        assert gaps("my.domain.Cubed") == ()


def test_a_forward_that_is_not_that_of_the_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(analytic.FORWARDS, "Softsign", lambda node, x: x / (2 + abs(x.real)))
    (gap,) = gaps("Softsign")
    assert gap.aspect == "independent forward"
    assert gap.what.startswith("Softsign: the independent forward ")
    assert "of the largest element for 'output'" in gap.what
    assert "with its kernel refgrad.backends.numpy.kernels.activation.softsign" in gap.what


def test_a_body_of_a_later_opset_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.kernels()
    monkeypatch.delitem(kernels._kernels, ("", "Softsign"))
    (gap,) = gaps("Softsign")
    assert gap.what == "none, and its function body needs opset 18, where the cases have 16"
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 16]> g (float[2] x) => (float[2] y) { y = Softsign(x) }'
    )
    with pytest.raises(BackendError, match="no kernel for 'Softsign', and the operator's function body needs opset 18"):
        get_backend("numpy").prepare(model).run({"x": np.ones(2, np.float32)})


def _raises(x: np.ndarray) -> np.ndarray:
    return undefined_thing(x)  # type: ignore[name-defined,no-any-return]  # noqa: F821


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x: x * x, "of the largest element for 'y'"),
        (lambda x: x.sum() ** 3, "returned shape () and not (2,)"),
        (lambda x: None, "returned None and not an array"),
        (_raises, "name 'undefined_thing' is not defined"),
    ],
)
@pytest.mark.parametrize("analytic", [False, True])
@pytest.mark.usefixtures("_again")
def test_a_forward_of_a_package_that_is_not_that_of_its_kernel_is_told(
    wrong: Callable[..., Any], what: str, analytic: bool
) -> None:
    with forgetting():

        @rule("Cubed", domain="my.domain")
        def cubed(op: Any, d_y: str, x: str) -> Any:
            """dx = 3·x²·dy"""
            return op.Mul(op.Mul(op.Mul(x, x), 3.0), d_y)

        kernel("Cubed", domain="my.domain")(lambda x: x**3)
        forward("Cubed", domain="my.domain", analytic=analytic)(wrong)
        case("Cubed", domain="my.domain")(lambda make: [make(np.float32([0.5, 2]))])
        (gap,) = (gap for gap in gaps("my.domain.Cubed") if gap.aspect == "independent forward")
        assert what in gap.what
        assert gap.where == wrong.__module__


def test_what_has_no_derivative_lacks_nothing() -> None:
    assert gaps("Shape") == ()
    with pytest.raises(UnknownNameError, match=r"There is no operator 'Softsgn'\. Did you mean 'Softsign'"):
        gaps("Softsgn")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('aspect = "case"\nbecause = "x"\noperators = []', "no aspect 'case'. Did you mean 'cases'"),
        ('aspect = "cases"\nbecause = "x"\noperators = ["Conv", "Conv"]', "Conv has a reason already: x"),
        ('aspect = "cases"\noperators = ["Conv"]', "because"),
    ],
)
def test_a_reason_that_is_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "reasons.toml"
    file.write_text(f"[[reason]]\n{text}\n")
    with pytest.raises(RecordsError, match=message):
        read_reasons(file)


def test_the_aspects_are_what_the_contributing_guide_names() -> None:
    guide = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [aspect for aspect in ASPECTS if aspect not in guide] == []


def test_the_quick_session_finds_what_touches_an_operator(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = one_operator.selection(["Softsign", "com.microsoft.Gelu"])
    files = {Path(file).name for file in chosen[:-2]}
    assert {"test_rules_activation.py", "test_rules_microsoft.py", "test_node_models.py", "test_coverage.py"} <= files
    assert files >= {f"test_{name}.py" for name in one_operator.EVERY}
    assert chosen[-2:] == ["-k", "Softsign or Gelu"]
    assert one_operator.main(["Softsgn"]) == 2
    assert "Did you mean 'Softsign'" in capsys.readouterr().err
    assert one_operator.main([]) == 2

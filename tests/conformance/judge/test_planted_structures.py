"""The judge finds what is wrong with a derivative of If, Loop or Scan: steps, directions, axes, sums, branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from refgrad.builder.op import Emitter
from refgrad.conformance import verdicts
from refgrad.conformance.case import Case
from refgrad.conformance.cases.control_flow import IFS, LOOPS, SCANS, FlowRow, flow
from refgrad.conformance.judge.judge import Candidate, judge
from refgrad.conformance.judge.running import runner
from refgrad.conformance.oracles import Observation
from refgrad.conformance.problems.point import in_float64
from refgrad.conformance.problems.problem import ask
from refgrad.conformance.problems.systems.builders import build
from refgrad.errors import RefgradError
from refgrad.rules.control_flow import If, Loop, ScanRule

pytestmark = pytest.mark.interpreter

Patch = pytest.MonkeyPatch
right_emitted = Emitter.emit_all


def verdict(case: Case) -> str:
    """What the judge says of refgrad's gradient of a case, which it knows itself."""
    problem = ask(case)
    observations: list[Observation] = [said for oracle in runner.ORACLES for said in runner.observe(oracle, problem)]
    built = build("refgrad", problem)
    gradients = built.named(in_float64(built.model).run(built.feeds(problem.at, problem.wide_cotangents)))
    nodes = len(built.model.graph.node)
    [row] = judge(problem, observations, [Candidate("refgrad", "numpy", nodes, gradients)])
    return row.verdict


def emitted(change: Callable[[dict[str, Any]], Any]) -> Callable[[Patch], None]:
    """Change the attributes of the node of the backward pass."""

    def plant(patch: Patch) -> None:
        def wrong(op: Any, op_type: str, domain: str, inputs: Any, outputs: int, attributes: Any, *more: Any) -> Any:
            if op_type in ("If", "Loop", "Scan"):
                change(attributes)
            return right_emitted(op, op_type, domain, inputs, outputs, attributes, *more)

        patch.setattr(Emitter, "emit_all", wrong)

    return plant


def the_first_step_first(attributes: dict[str, Any]) -> None:
    [node] = [node for node in attributes["body"].node if node.op_type == "Sub" and node.name.endswith("_step")]
    node.op_type = "Identity"
    del node.input[0]


def set_to(name: str, value: Callable[[list[int]], list[int]]) -> Callable[[dict[str, Any]], None]:
    return lambda attributes: attributes.update({name: value(attributes[name])})


def swap_the_branches(attributes: dict[str, Any]) -> None:
    then, other = attributes["then_branch"], attributes["else_branch"]
    attributes.update(then_branch=other, else_branch=then)


def no_sum_over_the_steps(patch: Patch) -> None:
    patch.setattr(Emitter, "sum", lambda self, parts, like: parts[-1])


def no_stacks(cls: type) -> Callable[[Patch], None]:
    def nothing(self: Any, swept: Any, stacks: Any, cotangents: Any, steps: Any) -> None:
        steps.number = swept.op.fresh("step")

    return lambda patch: patch.setattr(cls, "seed", nothing)


def other_sign(cls: type, position: int) -> Callable[[Patch], None]:
    right = cls.differentiate  # type: ignore[attr-defined]

    def wrong(self: Any, op: Any, *arguments: Any) -> Iterator[tuple[str, str]]:
        found = list(right(self, op, *arguments))
        name, adjoint = found[position]
        found[position] = name, op.Neg(adjoint)
        yield from found

    return lambda patch: patch.setattr(cls, "differentiate", wrong)


PLANTED: dict[str, tuple[str, FlowRow, Callable[[Patch], None]]] = {
    "a state of Scan, other sign": ("Scan", SCANS[0], other_sign(ScanRule, 0)),
    "a slice of Scan, other sign": ("Scan", SCANS[0], other_sign(ScanRule, -1)),
    "slices read in the direction of the forward pass": (
        "Scan",
        SCANS[3],
        emitted(set_to("scan_input_directions", lambda ways: [1 - way for way in ways])),
    ),
    "slices made in the direction of the forward pass": (
        "Scan",
        SCANS[0],
        emitted(set_to("scan_output_directions", lambda ways: [1 - way for way in ways])),
    ),
    "slices along the first axis": (
        "Scan",
        SCANS[3],
        emitted(set_to("scan_output_axes", lambda axes: [0 for _ in axes])),
    ),
    "a weight of the first step alone, Scan": ("Scan", SCANS[0], no_sum_over_the_steps),
    "a weight of the first step alone, Loop": ("Loop", LOOPS[0], no_sum_over_the_steps),
    "nothing through the stack, Scan": ("Scan", SCANS[0], no_stacks(ScanRule)),
    "nothing through the stack, Loop": ("Loop", LOOPS[0], no_stacks(Loop)),
    "what another step computed": ("Loop", LOOPS[0], emitted(the_first_step_first)),
    "a state of Loop, other sign": ("Loop", LOOPS[5], other_sign(Loop, 0)),
    "the other branch": ("If", IFS[3], emitted(swap_the_branches)),
    "a branch, other sign": ("If", IFS[0], other_sign(If, 0)),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_it_is_found(planted: str, monkeypatch: Patch) -> None:
    op, row, plant = PLANTED[planted]
    case = flow(op, row)
    with np.errstate(all="ignore"):
        assert verdict(case) == verdicts.RIGHT
        plant(monkeypatch)
        try:
            assert verdict(case) == verdicts.WRONG
        except RefgradError:
            return  # the gradient does not run at all


def test_a_kink_within_a_graph_is_one() -> None:
    nodes = """[node] y = Loop (M, "", x) <body = f (int64 i, bool go, T[] h) => (bool on, T[] n) {
                 on = Identity(go) r = Relu(h) n = Mul(r, w) }>"""
    feeds = {"M": np.array(2), "x": np.array([0.5, 0.0]), "w": np.array([1.5, 0.5])}
    case = flow("Loop", ("at-a-kink", "T[i] y", nodes, feeds))
    with np.errstate(all="ignore"):
        assert verdict(replace(case, values="kink")) == verdicts.CONVENTION

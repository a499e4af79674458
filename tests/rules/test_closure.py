"""A gradient model can be differentiated again: what rules and lowerings emit has a rule itself, or a derivative of zero."""

import importlib

import pytest
from sampling import sampled

import refgrad
from refgrad.conformance.cases import files
from refgrad.tables.registry import BODY, CONTROL_FLOW_RULES, RULES, ZERO

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

FAMILIES = sorted({family for family, _ in files()})


def test_every_family_of_rules_has_its_cases():
    modules = (rule.function.__module__ for rule in RULES.values())
    families = {module.split(".")[2] for module in modules if module.startswith("refgrad.rules.")}
    assert families <= {*FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_emitted_has_a_verdict(family):
    """By one of so many cases of each family."""
    cases = [case for name, file in files() if name == family for case in importlib.import_module(file).cases()]
    emitted = set()
    for case in sampled(cases, family):
        gradient = refgrad.gradient(case.model, wrt=case.wrt, outputs=case.outputs)
        emitted |= {(node.domain, node.op_type) for node in gradient.graph.node}
    emitted -= BODY.keys() if family in ("microsoft", "rare") else set()  # forward nodes that round stay what they are
    assert not emitted - RULES.keys() - CONTROL_FLOW_RULES.keys() - ZERO.keys()

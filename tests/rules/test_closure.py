"""A gradient model can be differentiated again: what rules and lowerings emit has a rule itself, or a derivative of zero."""

import importlib
import pkgutil

import pytest
from sampling import sampled

import refgrad
import refgrad.conformance.cases
from refgrad.conformance.cases import microsoft
from refgrad.tables.registry import BODY, RULES, STRUCTURES, ZERO

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

FAMILIES = sorted(module.name for module in pkgutil.iter_modules(refgrad.conformance.cases.__path__))


def test_every_family_of_rules_has_its_cases():
    families = {module.name for module in pkgutil.iter_modules(refgrad.rules.__path__)}
    of_runtime = {module.__name__.rpartition(".")[2] for module in microsoft.families()}
    assert families - {"call", "nondifferentiable"} <= {*FAMILIES, *of_runtime}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_emitted_has_a_verdict(family):
    """By one of so many cases of each family."""
    cases = importlib.import_module(f"refgrad.conformance.cases.{family}").cases()
    emitted = set()
    for case in sampled([*cases], family):
        gradient = refgrad.gradient(case.model, wrt=case.wrt, outputs=case.outputs)
        emitted |= {(node.domain, node.op_type) for node in gradient.graph.node}
    emitted -= BODY.keys() if family in ("microsoft", "rare") else set()  # forward nodes that round stay what they are
    assert not emitted - RULES.keys() - STRUCTURES.keys() - ZERO.keys()

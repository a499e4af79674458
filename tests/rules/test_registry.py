"""A rule is bound to its operator's schema when it is defined; what does not fit is refused with the names that would."""

import itertools
import re

import numpy as np
import onnx
import pytest

import refgrad
from refgrad.backends.numpy import registry as registry_of_kernels
from refgrad.backends.numpy.registry import find, kernel
from refgrad.conformance.case import node_case
from refgrad.errors import RuleError
from refgrad.extend import lowering, rule
from refgrad.rewrites.forms import FORMS, form
from refgrad.tables import registry
from refgrad.tables.definitions import DEFINITIONS, body
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.primitives import PRIMITIVES
from refgrad.tables.schemas import DECLARED


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    for module in ("function_bodies", "path", "reasons", "requested", "sweep"):
        monkeypatch.setattr(f"refgrad.reverse.{module}.RULES", registry.RULES)


def test_a_misspelt_parameter_is_refused_with_the_names_of_the_schema():
    with pytest.raises(
        RuleError, match=r"'axes'.*Inputs: input; outputs \(cotangents with d_\): output; attributes: axis"
    ):

        @rule("Softmax")
        def softmax(op, d_output, axes):
            """Not this one."""


def test_an_unknown_name_in_wrt_is_refused_with_the_inputs():
    with pytest.raises(RuleError, match="'X' in wrt; the inputs are data, starts, ends, axes, steps"):

        @rule("Slice", wrt=["X"])
        def slice_(op, d_output):
            """Not this one."""


@pytest.mark.parametrize("result", [("a",), ("a", "b", "c"), "a"])
def test_a_rule_that_returns_too_few_or_too_many_adjoints_is_named(result):
    @rule("Mul", replace=True)
    def mul(op, d_C):
        """Too few."""
        return result

    case = node_case("Mul", np.ones(2, np.float32), np.ones(2, np.float32))
    said = r"rule for Mul returned (. cotangents|the name 'a') for node 'node'; expected one each for A, B"
    with pytest.raises(RuleError, match=said):
        refgrad.gradient(case.model)


def test_a_lowering_has_the_parameters_of_its_primitive():
    with pytest.raises(RuleError, match="lowering of ReluGrad has the parameters dY, X; the primitive has dY, Y"):

        @lowering("ReluGrad")
        def relu_grad(op, dY, X):
            """Not this one."""


def test_a_lowering_may_take_the_rest_of_the_inputs_and_attributes():
    with pytest.raises(
        RuleError, match="lowering of SoftmaxGrad has the parameters Y, axis; the primitive has dY, Y, axis"
    ):

        @lowering("SoftmaxGrad", dialect="ort")
        def wrong_input(op, Y, *others, axis):
            """Not the first one."""

    with pytest.raises(
        RuleError, match="lowering of SoftmaxGrad has the parameters dY, axes; the primitive has dY, Y, axis"
    ):

        @lowering("SoftmaxGrad", dialect="ort")
        def wrong_attribute(op, dY, *others, axes, **attributes):
            """Not one of its attributes."""


def test_a_lowering_names_an_existing_primitive_and_dialect():
    with pytest.raises(RuleError, match="'ReluGradient' is no primitive; there are Alias"):
        lowering("ReluGradient")(lambda op: None)
    with pytest.raises(RuleError, match="no dialect 'trt'; there are onnx, ort"):
        lowering("ReluGrad", dialect="trt")


def test_every_primitive_has_a_meaning_in_plain_operators():
    assert set(DIALECTS["onnx"].lowerings) == set(PRIMITIVES)
    assert set(DIALECTS["ort"].lowerings) <= set(PRIMITIVES)


@pytest.mark.parametrize("key", sorted(registry.RULES), ids=lambda key: ".".join(filter(None, key)))
def test_every_rule_says_its_formula_and_binds_in_every_opset(key):
    domain, op_type = key
    made = registry.RULES[key]
    assert made.formula
    if domain == "":
        since = min(s.since_version for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == key)
        for opset in range(max(16, since), onnx.defs.onnx_opset_version() + 1):
            reads, places = made.bind(opset)
            assert len(reads) >= len(made.parameters) - ("**" in made.parameters)
            assert places, f"{op_type} has nothing to differentiate in opset {opset}"


def test_no_operator_has_two_verdicts():
    tables = (registry.RULES, registry.CONTROL_FLOW_RULES, registry.ZERO, registry.NO_DERIVATIVE)
    for one, other in itertools.combinations(tables, 2):
        assert not set(one) & set(other)


@pytest.mark.parametrize("key", sorted(registry.CONTROL_FLOW_RULES), ids=lambda key: ".".join(filter(None, key)))
def test_every_control_flow_rule_says_its_formula(key):
    assert registry.CONTROL_FLOW_RULES[key].formula().splitlines()[0]


def test_a_rule_for_a_custom_operator_differentiates_it():
    parameter = onnx.defs.OpSchema.FormalParameter
    onnx.defs.register_schema(
        onnx.defs.OpSchema(
            "Cube",
            "test.domain",
            1,
            inputs=[parameter("x", "T")],
            outputs=[parameter("y", "T")],
            type_constraints=[("T", ["tensor(float)", "tensor(double)"], "")],
        )
    )
    try:

        @rule("Cube", domain="test.domain")
        def cube(op, d_y, x):
            """dx = 3·x²·dy"""
            return op.Mul(op.Mul(op.Mul(x, x), 3.0), d_y)

        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 18, "test.domain": 1]> g (float[N] x) => (float[N] y) '
            "<float[N] h> { h = test.domain.Cube(x) y = Mul(h, x) }"
        )
        gradient = refgrad.gradient(model)
        assert [n.op_type for n in gradient.graph.node] == ["Cube", "Mul", "Mul", "Mul", "Mul", "Mul", "Add"]
    finally:
        onnx.defs.deregister_schema("Cube", 1, "test.domain")


# Registered twice

BOTH = (
    r"has a .* already: refgrad\.[a-z_.]+ \(.*/[a-z]+\.py:\d+\)\. "
    r"test.*\(.*test_registry\.py:\d+\) would take its place.*replace=True"
)


def _nothing(*parameters: str):
    """A function with these parameters."""
    scope: dict = {}
    exec(compile(f"def planted({', '.join(parameters)}): pass", __file__, "exec"), scope)
    scope["planted"].__module__ = __name__
    return scope["planted"]


TWICE = {
    "rule": (lambda **o: rule("Mul", **o), ("op", "d_C")),
    "lowering": (lambda **o: lowering("ReluGrad", **o), ("op", "dY", "Y")),
    "control-flow rule": (lambda **o: registry.control_flow_rule("Loop", **o), None),
    "kernel": (lambda **o: kernel("Softsign", **o), ("x",)),
    "form": (lambda **o: form("ReluGrad", results="dX", **o), ("op", "dY", "Y")),
    "function body": (lambda **o: body("FastGelu", "Y", domain="com.microsoft", **o), ("op", "X")),
}


@pytest.fixture
def _tables(monkeypatch):
    for table in (registry.CONTROL_FLOW_RULES, registry.BODY, DIALECTS["onnx"].lowerings, FORMS, DEFINITIONS, DECLARED):
        for key, value in list(table.items()):
            monkeypatch.setitem(table, key, value)
    kernels = registry_of_kernels._kernels
    find("", "Softsign", 1)
    monkeypatch.setitem(kernels, ("", "Softsign"), list(kernels["", "Softsign"]))


@pytest.mark.usefixtures("_tables")
@pytest.mark.parametrize("kind", TWICE)
def test_a_second_registration_names_both_places(kind):
    register, parameters = TWICE[kind]
    second = (
        _nothing(*parameters) if parameters else type("Planted", (registry.ControlFlowRule,), {"__module__": __name__})
    )
    with pytest.raises(RuleError, match=f"{kind} " if kind != "function body" else kind) as caught:
        register()(second)
    assert re.search(
        BOTH if parameters else r"has a control-flow rule already: refgrad\..*replace=True", str(caught.value)
    )
    register(replace=True)(second)


def test_a_module_that_is_loaded_again_registers_again():
    right = registry.RULES["", "Mul"]
    rule("Mul", broadcast=True)(right.function)
    assert registry.RULES["", "Mul"].function is right.function

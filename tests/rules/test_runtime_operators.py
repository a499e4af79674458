"""Every operator that ONNX Runtime registers is classified, and those that refgrad defines have its signature."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import onnx
import pytest

from refgrad.protos.domains import MICROSOFT
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.operators import classify, operators
from refgrad.tables.runtime_operators import release, runtime_operators

SCRIPT = Path(__file__).parents[2] / "docs" / "runtime_operators.py"
TABLE = runtime_operators()
DEFINED = sorted(key for key in TABLE if key in DEFINITIONS)


@pytest.mark.parametrize("key", sorted(TABLE), ids=".".join)
def test_every_operator_is_classified_with_a_formula_or_a_reason(key: tuple[str, str]) -> None:
    found = classify(*key)
    assert found.derivative in ("rule", "function", "zero", "none")
    assert found.text


def test_the_list_of_operators_has_all_of_them() -> None:
    named = {one.operator for one in operators()}
    assert {".".join(key) for key in TABLE} <= named


@pytest.mark.parametrize("key", DEFINED, ids=".".join)
def test_a_definition_has_the_signature_that_onnx_runtime_registers(key: tuple[str, str]) -> None:
    ours, theirs = DEFINITIONS[key], TABLE[key]
    assert [p.name for p in ours.schema.inputs] == [name for name, _, _ in theirs.inputs]
    assert [p.name for p in ours.schema.outputs] == [name for name, _, _ in theirs.outputs]
    options = [str(p.option).rpartition(".")[2].lower() for p in ours.schema.inputs]
    assert options == [option for _, _, option in theirs.inputs]
    assert set(ours.signature.defaults) == set(theirs.attributes)
    for name, (kind, default, required) in theirs.attributes.items():
        attribute = ours.schema.attributes[name]
        assert str(attribute.type).rpartition(".")[2].lower() == kind, name
        assert attribute.required == required, name
        if default is not None:
            assert ours.rounded[name] == pytest.approx(default), name


def written() -> dict[str, object]:
    spec = importlib.util.spec_from_file_location("written", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.table()  # type: ignore[no-any-return]


def test_the_table_lacks_no_operator_of_the_installed_onnx_runtime() -> None:
    """One that the table lacks has to be classified: run python docs/runtime_operators.py, and see `refgrad ops`."""
    runtime = pytest.importorskip("onnxruntime")
    if tuple(map(int, runtime.__version__.split(".")[:2])) < tuple(map(int, release().split(".")[:2])):
        pytest.skip(f"older than {release()}")
    made = written()
    domains = made["operators"]
    assert isinstance(domains, dict)
    lacking = {f"{domain}.{name}" for domain in domains for name in domains[domain]} - {".".join(key) for key in TABLE}
    assert not lacking
    if made["onnxruntime"] == release():
        assert all(vars(TABLE[domain, name]) == one for domain in domains for name, one in domains[domain].items())


def test_onnx_has_none_of_them() -> None:
    """Nothing is registered with onnx: its checker knows them no more than before."""
    assert not any(onnx.defs.has(name, domain) for domain, name in TABLE if domain == MICROSOFT)

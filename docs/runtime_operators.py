"""Write the table of ONNX Runtime's own operators, as the installed onnxruntime registers them.

python docs/runtime_operators.py    # writes refgrad/tables/runtime_operators.json; then docs/generate.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onnx import AttributeProto, helper

from refgrad.protos.domains import MICROSOFT, NCHWC

TABLE = Path(__file__).resolve().parent.parent / "refgrad" / "tables" / "runtime_operators.json"


def table() -> dict[str, Any]:
    """The operators of com.microsoft and com.microsoft.nchwc, by domain and name, with their signature.

    An input is [name, type, option]; an attribute is [type, default, whether it is required]; `cpu` says whether the package
    has a kernel for it on the CPU.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    on_cpu = {(one.domain, one.op_name) for one in state.get_all_opkernel_def()}
    found: dict[str, dict[str, Any]] = {MICROSOFT: {}, NCHWC: {}}
    for schema in sorted(state.get_all_operator_schema(), key=lambda one: (one.name, one.since_version)):
        if schema.domain in found:
            found[schema.domain][schema.name] = {
                "version": schema.since_version,
                "cpu": (schema.domain, schema.name) in on_cpu,
                "inputs": [_parameter(one) for one in schema.inputs],
                "outputs": [_parameter(one) for one in schema.outputs],
                "attributes": {name: _attribute(one) for name, one in sorted(schema.attributes.items())},
                "types": {one.type_param_str: sorted(one.allowed_type_strs) for one in schema.type_constraints},
            }
    return {"onnxruntime": onnxruntime.__version__, "operators": found}


def _parameter(one: Any) -> list[str]:
    return [one.name, one.typeStr, str(one.option).rpartition(".")[2].lower()]


def _attribute(one: Any) -> list[Any]:
    default = AttributeProto.FromString(one._default_value)
    value: Any = None
    if default.type != AttributeProto.UNDEFINED:
        value = helper.get_attribute_value(default)
        value = value.decode() if isinstance(value, bytes) else value
    return [str(one.type).rpartition(".")[2].lower(), value, one.required]


def text() -> str:
    """The table as it is written: an operator in a line."""
    made = table()
    domains = []
    for domain, operators in made["operators"].items():
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in operators.items())
        domains.append(f"{json.dumps(domain)}: {{\n{rows}\n}}")
    return f'{{"onnxruntime": {json.dumps(made["onnxruntime"])}, "operators": {{\n' + ",\n".join(domains) + "\n}}\n"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
    print(TABLE)

"""The options that refgrad adds to pytest. Nothing of refgrad is imported before one is used: it would cost every run."""

from __future__ import annotations

import pytest

_NEEDED = "--refgrad-backend"
_BUILDER = "refgrad"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("refgrad", "refgrad: conformance of ONNX gradients")
    group.addoption(
        _NEEDED, metavar="NAME", help="test gradients on this executor: ort-cpu, numpy, package.module:Class"
    )
    group.addoption("--refgrad-builder", metavar="NAME", help=f"who builds the gradients ({_BUILDER} by default)")
    group.addoption("--refgrad-ops", metavar="OPS", help="the operators to test, separated by commas: Conv,Mul")
    group.addoption("--refgrad-limitations", metavar="FILE", help="a TOML file of known failures, each with a reason")


def pytest_configure(config: pytest.Config) -> None:
    """Load the suite where it is asked for."""
    given = {name: config.getoption(f"refgrad_{name}") for name in ("backend", "builder", "ops", "limitations")}
    if given["backend"]:
        from refgrad.conformance.tools.exporting.pytest_plugin import Suite

        operators = [name.strip() for name in given["ops"].split(",")] if given["ops"] else None
        suite = Suite(config, given["backend"], given["builder"] or _BUILDER, operators, given["limitations"])
        config.pluginmanager.register(suite, "refgrad-suite")
    elif any(given.values()):
        name = next(name for name, value in given.items() if value)
        raise pytest.UsageError(f"--refgrad-{name} needs {_NEEDED} NAME: on which executor shall the gradients run?")

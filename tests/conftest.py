"""Sampling of test matrices: with REFGRAD_SAMPLE=8 pytest runs one of eight tests of every matrix. By default it runs all.

A test function marked `matrix` asks the same question of many cases. Its tests are sorted by operator, the first word of their
parameters, and every eighth one runs. An operator with eight cases keeps at least one. A hash of the package selects the tests.
Nothing is random: the same package runs the same tests on every machine.

With REFGRAD_SAMPLE_ALL=1 every test with parameters is sampled, except those of dialect "ort" or marked `training`. The session
`training` sets it: other sessions run these tests on a newer ONNX Runtime.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from sampling import VARIABLE, content, kept, share

from refgrad.tables import plugins

ALL = "REFGRAD_SAMPLE_ALL"

plugins.load()  # many a test reads the tables of operators


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that are not in the sample."""
    if share() == 1:
        return
    matrices = [item.nodeid for item in items if _is_sampled(item)]
    gone = {*matrices} - kept(matrices, share(), content())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in gone])
    items[:] = [item for item in items if item.nodeid not in gone]


def _is_sampled(item: pytest.Item) -> bool:
    if item.get_closest_marker("matrix"):
        return True
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    repeated = parameters and parameters.get("dialect") != "ort" and not item.get_closest_marker("training")
    return bool(os.environ.get(ALL) and repeated)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print which sample runs."""
    said = session.config.pluginmanager.get_plugin("terminalreporter")
    if share() > 1 and said is not None and not hasattr(session.config, "workerinput"):
        which = "with parameters" if os.environ.get(ALL) else "of a matrix"
        said.write_line(f"One of {share()} tests {which}, those of the content {content()}. All: {VARIABLE}=1.")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which would scan 50,000 tests repeatedly. Later collections skip them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _wide_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they need, whatever COLUMNS says where the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def forgetful() -> Generator[None]:
    """What a test registers is forgotten behind it. The site's environment lacks what this imports."""
    from registering import forgetting

    with forgetting():
        yield

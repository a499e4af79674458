"""Memory that is given away at every size: kernels do not ask for that of small results, and tests have small ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from refgrad.backends.numpy import registry
from refgrad.backends.numpy.kernels import arithmetic


@pytest.fixture(scope="module", autouse=True)
def at_every_size() -> Iterator[None]:
    """A test module that has this fixture sees what happens to large results."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (registry, arithmetic):
            patch.setattr(module, "SMALL", 1)
        yield

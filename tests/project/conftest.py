"""What the examples of pages and docstrings register is forgotten behind each."""

from collections.abc import Iterator

import pytest
from registering import forgetting


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    with forgetting():
        yield

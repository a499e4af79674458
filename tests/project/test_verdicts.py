"""The words of verdicts: the glossary defines each, as the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from refgrad.conformance.verdicts import FAULTS, OF_SIDES, VERDICTS

GLOSSARY = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()


def plain(text: str) -> str:
    """The text of Markdown without its links."""
    return text.replace("[kink](#kink)", "kink")


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_glossary_defines_every_verdict(verdict):
    fault = " yes" if verdict in FAULTS else ""
    assert f"| {verdict} | {VERDICTS[verdict]} |{fault} |" in plain(GLOSSARY)


@pytest.mark.parametrize("verdict", OF_SIDES)
def test_the_glossary_defines_the_words_of_compare(verdict):
    assert f"| {verdict} | {OF_SIDES[verdict]} |" in GLOSSARY

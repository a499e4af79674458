"""The chapters of the course, by number."""

from __future__ import annotations

from refgrad.errors import OptionError
from refgrad.teaching.chapter import Chapter
from refgrad.teaching.chapters import attention, broadcasting, contributions, convolution, entropy, products

CHAPTERS: dict[int, Chapter] = {
    chapter.number: chapter
    for chapter in (
        contributions.CHAPTER,
        broadcasting.CHAPTER,
        products.CHAPTER,
        entropy.CHAPTER,
        convolution.CHAPTER,
        attention.CHAPTER,
    )
}


def chapter_of(number: int) -> Chapter:
    """The chapter with a number.

    :raises OptionError: there is none.
    """
    if number not in CHAPTERS:
        raise OptionError(f"There is no chapter {number}; there are 1 to {len(CHAPTERS)}. `refgrad teach` lists them.")
    return CHAPTERS[number]

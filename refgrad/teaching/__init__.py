"""Is an answer to an exercise of the course right, and if not, which mistake does it make?"""

from __future__ import annotations

from refgrad.teaching.chapter import Chapter, ExercisePoint, Mistake
from refgrad.teaching.chapters import CHAPTERS, chapter_of
from refgrad.teaching.judging import judge
from refgrad.teaching.skeletons import start
from refgrad.teaching.verdict import Example, Verdict

__all__ = ["CHAPTERS", "Chapter", "Example", "ExercisePoint", "Mistake", "Verdict", "chapter_of", "judge", "start"]

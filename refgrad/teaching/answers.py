"""Read and run an answer, and explain where it does not get as far as numbers."""

from __future__ import annotations

import io
import re
import sys
import traceback
import types
from pathlib import Path

from refgrad.errors import (
    BackendError,
    BrokenRuleError,
    NoGradientError,
    RefgradError,
    RuleError,
    beginning,
    choices,
    did_you_mean,
)
from refgrad.tables import plugins
from refgrad.tables.once import qualified
from refgrad.tables.registry import RULES
from refgrad.teaching.chapter import DOMAIN, Chapter

_LONGEST = 400  # characters of a message
_PRINTED = 2000  # characters that an answer prints and that are shown
_NAMES = (
    "The parameters of a rule are names of tensors, not arrays: the rule writes a graph, and computes nothing itself. "
    "Write op.Mul(a, b) for a * b, op.Add(a, b) for a + b, op.Transpose(a) for a.T."
)
_NODE = re.compile(r"node '[^']*' \((?P<operator>\w+)\)")
_UNKNOWN_NAME = re.compile(
    r"(?P<before>.*? )(?:the name )?'(?P<name>[^']*)'(?: for input \w+)?, which no node, input or constant is called\..*"
)
_ONE_NAME = re.compile(r"returned the name '[^']*'(?=; expected one each)")
_NEAREST = re.compile(r"Did you mean (\w+)(?: or \w+)+\?")
_ON_NAMES = re.compile("'str'|<U\\d|unsupported operand|sequence by non-int|not all arguments converted|'generator'")


class FaultError(Exception):
    """Why an answer did not get as far as numbers. `hints` are sentences for its author."""

    def __init__(self, *hints: str) -> None:
        super().__init__(" ".join(hints))
        self.hints = hints


class Printed(io.StringIO):
    """The text that an answer prints, as far as anybody wants to read it: the beginning, until there is `enough`."""

    enough = False

    def write(self, text: str) -> int:
        """Keep the text, or a part of it."""
        if not self.enough:
            super().write(text[: max(0, _PRINTED - self.tell())])
        return len(text)


def read_answer(chapter: Chapter, path: Path) -> None:
    """Run an answer as a module: it has to register a rule for the operator of the chapter.

    :raises FaultError: it is not Python, raises, ends the program, or registers something else.
    """
    plugins.load()
    before = set(RULES)
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f"line {error.lineno}: " if error.lineno else ""
        raise FaultError(f"This is not Python: {line}{error.msg}.") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise FaultError(f"This is not Python: {short(error)}.") from error
    module = types.ModuleType("answer")
    module.__file__ = str(path)
    sys.modules["answer"] = module
    sys.path.append(str(path.parent))  # at the end: a file beside the answer replaces no library
    try:
        exec(code, vars(module))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise FaultError(*explained(error, chapter, path)) from error
    if chapter.key in RULES:
        if RULES[chapter.key].broadcast:
            raise FaultError(
                "broadcast=True lets refgrad sum over broadcast axes. Leave it out: the exercise is to write the sum."
            )
        return
    registered = sorted(qualified(*key) for key in set(RULES) - before)
    decorator = f'@rule("{chapter.operator}", domain="{DOMAIN}")'
    raise FaultError(
        f"Expected a rule for {qualified(*chapter.key)}, got {', '.join(registered) or 'no rule'}. "
        f"Decorate the function with {decorator}."
    )


def explained(error: BaseException, chapter: Chapter, path: Path) -> tuple[str, ...]:
    """The sentences that explain an exception of an answer: the line that raised it, and advice."""
    root = error.__cause__ if isinstance(error, BrokenRuleError) and error.__cause__ is not None else error
    at = _line(root, path) or _line(error, path)
    line = f"Line {at}" if at else "The rule"
    if isinstance(root, NotImplementedError):
        return (f"The rule is not written yet: line {at} raises NotImplementedError. Put the derivative in its place.",)
    if isinstance(root, SystemExit | KeyboardInterrupt):
        return (f"{line} ends the program. A rule returns its cotangents, and ends nothing.",)
    if isinstance(root, MemoryError):
        return (f"{line} uses up the memory. A rule writes nodes; it needs no large arrays.",)
    if isinstance(root, EOFError):
        return (
            f"{line} waits for somebody to type, as input() does, and nobody can. A rule gets all it needs as parameters.",
        )
    if isinstance(root, RecursionError):
        return (f"{line} calls itself without end.",)
    if isinstance(root, BackendError):
        return (_failed(root, path),)
    if isinstance(root, NoGradientError):
        return (short(root),)
    if isinstance(root, RefgradError):
        return _refused(root, chapter, at)
    said = f"{line} raises {type(root).__name__}: {short(root)}"
    meant = _meant(root.name, chapter) if isinstance(root, NameError) and root.name else ""
    names = (_NAMES,) if _ON_NAMES.search(str(root)) else ()
    return (f"{said.rstrip('.')}.{meant}", *names)


def _meant(name: str, chapter: Chapter) -> str:
    """The parameter of the chapter's rule that an unknown name may mean, as a question; dX does not mean X."""
    cotangent = f"d_{chapter.output}"
    return did_you_mean(name, [cotangent] if name.startswith("d") else ["op", *chapter.inputs, *chapter.attributes])


def _failed(error: BackendError, path: Path) -> str:
    """The sentence that explains why the gradient model does not run, with the line of the node, if only one can be meant."""
    said = short(error).partition(" If its shapes do not fit, ")[0]
    found = _NODE.match(said)
    if found is None:
        return said
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    at = [number for number, line in enumerate(lines, 1) if re.search(rf"\bop\.{found['operator']}\b", line)]
    return f"{f'Line {at[0]}: ' if len(at) == 1 else ''}{found['operator']}{said[found.end() :]}"


def _refused(error: RefgradError, chapter: Chapter, line: int | None) -> tuple[str, ...]:
    """The sentences that explain why refgrad refuses a rule, and advice."""
    said = short(error).replace(" of node 'node'", "").replace(" for node 'node'", "")
    said = said.partition(" The node reads ")[0]
    said = _UNKNOWN_NAME.sub(r"\g<before>the text '\g<name>', which is the name of no tensor.", said)
    said = _ONE_NAME.sub("returned one name", said)
    said = _NEAREST.sub(r"Did you mean op.\1?", said)
    place = f"Line {line}: " if line and "line" not in said else ""
    more = []
    if "which is the name of no tensor" in said or "array of shape" in said:
        more.append(_NAMES)
    if within := re.search(r"for input (\w+), which is not variadic", said):
        more.append(f"Return d{within[1]} itself, not a list with it.")
    if "cotangents for node" in str(error) or "expected one each" in said:
        more.append(f"The rule returns {', '.join(f'd{name}' for name in chapter.floats)}, in this order.")
    if isinstance(error, RuleError) and "has a parameter" in said:
        given = ", ".join(["op", f"d_{chapter.output}", *chapter.inputs])
        more.append(
            f"The parameters are bound by their names, as in ({given}): {choices(chapter.inputs)} are the inputs."
        )
    return (place + said, *more)


def short(error: BaseException) -> str:
    """The message of an exception on one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    return beginning(said, _LONGEST)


def _line(error: BaseException, path: Path) -> int | None:
    """The innermost line of the answer that an exception passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None

"""A context breaks one rule or one function body while it lasts: `broken` puts the change in and takes it out again.

An emission is identified by its place in the source of the rule, or in the source of a lowering that the rule uses.
"""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from refgrad.builder.function import FunctionEmitter
from refgrad.builder.op import Emitter
from refgrad.conformance.tools.mutating.changes import BODY_CHANGES, CHANGES, Change, Emits, EmittedCall, emit_unchanged
from refgrad.tables.definitions import DEFINITIONS
from refgrad.tables.dialects import DIALECTS
from refgrad.tables.registry import RULES

_SUM = "BroadcastGradient"  # the primitive that the sweep adds
_EMITTERS = {str(file) for file in Path(__file__).parent.glob("*.py")} | {
    sys.modules[cls.__module__].__file__ for cls in {*Emitter.__mro__, *FunctionEmitter.__mro__} - {object}
}


@dataclass(frozen=True, order=True)
class Site:
    """An emission: its place in the source, the operator, and the text of the call."""

    file: str
    function: str
    position: tuple[int, int]
    op_type: str
    text: str = field(compare=False)

    @property
    def place(self) -> str:
        """The place as a reader finds it: module, function and call."""
        module = Path(self.file).with_suffix("")
        made = "" if f".{self.op_type}(" in self.text else f" [{self.op_type}]"
        return f"{'/'.join(module.parts[-2:])}.{self.function}: {self.text}{made}"


def _site(frame: FrameType | None, op_type: str) -> Site:
    """The place of the current emission: the innermost call outside of the emitter and of this folder."""
    while frame is not None and frame.f_code.co_filename in _EMITTERS:
        frame = frame.f_back
    assert frame is not None
    return _place(frame.f_code, frame.f_lasti, op_type)


@cache
def _place(code: CodeType, instruction: int, op_type: str) -> Site:
    line, end, column, end_column = list(code.co_positions())[instruction // 2]
    text = ""
    if line is not None and end is not None:
        lines = [linecache.getline(code.co_filename, number) for number in range(line, end + 1)]
        lines[-1] = lines[-1].encode()[:end_column].decode()
        lines[0] = lines[0].encode()[column:].decode()
        text = _one_line("".join(lines))
    return Site(code.co_filename, code.co_qualname, (line or 0, column or 0), op_type, text)


def _one_line(text: str) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(text).strip(), mode="eval"))
    except SyntaxError:  # the text is only a part of an expression
        return " ".join(text.split())


@dataclass
class Breaking:
    """A run of rules with at most one change. `emitted` has the names of the results of every site, in order."""

    change: tuple[Site, Change] | None = None
    ranks: Mapping[Site, Sequence[Sequence[int | None]]] = field(default_factory=dict)
    emitted: dict[Site, list[str]] = field(default_factory=lambda: defaultdict(list))
    busy: bool = False
    body: FunctionEmitter | None = None  # the last one that was emitted

    def emit(self, op: Emits, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Make the call, with the change if this is its site, and note the name of the result."""
        op_type = arguments[0]
        if self.busy or op_type not in (CHANGES if isinstance(op, Emitter) else BODY_CHANGES):
            return emit_unchanged(op, *arguments, **options)
        site = _site(sys._getframe(1), op_type)
        made: Any = None
        if self.change is not None and site == self.change[0]:
            made = self._changed(op, site, arguments, options)
        if made is None:
            made = emit_unchanged(op, *arguments, **options)
        self.emitted[site].append(made if isinstance(made, str) else made[0])
        return made

    def _changed(self, op: Emits, site: Site, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        op_type, domain, inputs, outputs, attributes, *rest = arguments
        seen, count = self.ranks.get(site, ()), len(self.emitted[site])
        optional = bool(options.get("optional_outputs", rest and rest[0]))
        ranks = seen[count] if count < len(seen) else ()
        it = EmittedCall(op, op_type, domain, list(inputs), outputs, dict(attributes), optional, ranks)
        self.busy = True
        before = len(op.nodes) if isinstance(op, FunctionEmitter) else 0
        try:
            assert self.change is not None
            made = self.change[1](it)
            if made is None and isinstance(op, FunctionEmitter):
                del op.nodes[before:]
            return made
        finally:
            self.busy = False


@contextmanager
def broken(
    key: tuple[str, str],
    breaking: Breaking,
    returned: Callable[[Any, dict[str, str | None]], dict[str, str | None]] | None = None,
) -> Iterator[None]:
    """Inside this context, the rule of an operator runs through `breaking`, and `returned` may change its cotangents.

    The sum over broadcast axes, which the sweep adds to a rule, runs through `breaking` too. Of an operator without a rule it
    is the body that does, and `returned` may change its results.
    """
    with _broken_rule(key, breaking, returned) if key in RULES else _broken_body(key, breaking, returned):
        yield


@contextmanager
def _broken_body(key: tuple[str, str], breaking: Breaking, returned: Any) -> Iterator[None]:
    known = DEFINITIONS[key]
    names = [output.name for output in known.schema.outputs]

    def function(op: FunctionEmitter, *arguments: Any, **keywords: Any) -> Any:
        breaking.emitted.clear()  # a body is emitted again when more is known of its inputs
        breaking.body = op
        with _watched(op, breaking):
            result = known.function(op, *arguments, **keywords)
        if returned is None:
            return result
        return _rebuilt(result, returned(op, dict(_entries(names, result))))

    DEFINITIONS[key] = replace(known, function=function)
    try:
        yield
    finally:
        DEFINITIONS[key] = known


@contextmanager
def _broken_rule(key: tuple[str, str], breaking: Breaking, returned: Any) -> Iterator[None]:
    rule = RULES[key]

    def function(op: Emitter, *arguments: Any, **keywords: Any) -> Any:
        with _watched(op, breaking):
            result = rule.function(op, *arguments, **keywords)
        if returned is None:
            return result
        entries = dict(_entries(rule.wrt, result))
        return _rebuilt(result, returned(op, entries))

    sums = [one.lowerings for one in DIALECTS.values() if _SUM in one.lowerings] if rule.broadcast else []
    right = [table[_SUM] for table in sums]
    RULES[key] = replace(rule, function=function)
    for table, lower in zip(sums, right, strict=True):
        table[_SUM] = _watching(lower, breaking)
    try:
        yield
    finally:
        RULES[key] = rule
        for table, lower in zip(sums, right, strict=True):
            table[_SUM] = lower


@contextmanager
def _watched(op: Emits, breaking: Breaking) -> Iterator[None]:
    def emit(*arguments: Any, **options: Any) -> Any:
        return breaking.emit(op, arguments, options)

    def scan(step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        def watched(inner: FunctionEmitter, *inputs: Any) -> Any:
            with _watched(inner, breaking):
                return step(inner, *inputs)

        return FunctionEmitter.scan(op, watched, *arguments, **options)  # type: ignore[arg-type]

    before = dict(vars(op))
    vars(op)["emit"] = emit
    if isinstance(op, FunctionEmitter):
        vars(op)["scan"] = scan
    try:
        yield
    finally:
        for name in ("emit", "scan"):
            vars(op).pop(name, None)
            if name in before:
                vars(op)[name] = before[name]


def _watching(lower: Callable[..., Any], breaking: Breaking) -> Callable[..., Any]:
    """A lowering whose emissions go through `breaking`."""

    def watched(op: Emitter, *inputs: Any) -> Any:
        with _watched(op, breaking):
            return lower(op, *inputs)

    return watched


def _entries(wrt: Sequence[str], result: Any) -> Iterator[tuple[str, str | None]]:
    """The cotangents that a rule returned, by input; the cotangents of a variadic input are numbered."""
    for name, adjoint in zip(wrt, result if isinstance(result, tuple) else (result,), strict=False):
        if isinstance(adjoint, list | tuple):
            yield from ((f"{name}_{k}", one) for k, one in enumerate(adjoint))
        else:
            yield name, adjoint


def _rebuilt(result: Any, entries: Mapping[str, str | None]) -> Any:
    """The cotangents in the form in which the rule returned them."""
    values = iter(entries.values())

    def one(adjoint: Any) -> Any:
        return [next(values) for _ in adjoint] if isinstance(adjoint, list | tuple) else next(values)

    return tuple(map(one, result)) if isinstance(result, tuple) else one(result)

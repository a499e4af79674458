"""How a message names an option: library code names the parameter of a function, and a command names its own option."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from refgrad.escaping import shell
from refgrad.planning.program import ANY

_TEXT = r"""(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""  # as repr writes it
_QUOTED = re.compile(rf"(?<![\w]){_TEXT}(?!\w)")  # an apostrophe quotes nothing
_VALUE = re.compile(rf"\[(?:{_TEXT}|[^\]'\"])*\]|\{{(?:{_TEXT}|[^}}'\"])*\}}|{_TEXT}|[-+\w.]*\w")
_LIST = rf"(?:None|\[(?:{_TEXT}|[^\]'\"])*\])"
_CUT = re.compile(
    rf"refgrad\.select_model_inputs_outputs(?:\(model, ({_LIST})(?:, ({_LIST}))?(?:, keep_inputs=True)?\))?"
)
_FILLED_IN = ("[...]", "{...}")  # where the reader writes a value
_EXAMPLES = {"--feeds": "FILE.npz", "--dim": "N=8", "--data-folder": "DIR", "--validation": "DATA"} | dict.fromkeys(
    ("--wrt", "--outputs", "--trainable", "--freeze", "--lora"), "NAMES"
)
_OTHERWISE = {  # parameters that have another name on the command line: the first one that the command has
    "sizes": ("--dim",),
    "size": ("--dim", "--batch-size"),
    "length": ("--warmup",),
    "period": ("--epochs",),
    "data_folders": ("--data-folder",),
    "executor": ("--backend",),
    "backends": ("--backend",),
    "dialects": ("--dialect",),
    "output": ("--of",),
    "weights": ("--lora",),
    "recompute": ("--recompute-nodes",),
}


def in_the_shell(message: str, flags: Mapping[str, str]) -> str:
    """`message` with `--wrt x` in place of `wrt='x'`. Text in quotes, such as names in a model, stays as it is.

    :param flags: the option of each parameter of the command.

    >>> in_the_shell("Give wrt=['x', 'w'], not 'wrt=1'; or strong_zero=True.", {"wrt": "--wrt", "strong_zero": "--strong-zero"})
    "Give --wrt x,w, not 'wrt=1'; or --strong-zero."
    >>> in_the_shell("refgrad.select_model_inputs_outputs(model, ['h']) makes it an output.", {})
    'refgrad cut MODEL --outputs h -o PART.onnx makes it an output.'
    """
    for call in reversed(list(_outside_quotes(_CUT, message))):
        message = message[: call.start()] + _as_cut(call) + message[call.end() :]
    own = {name: flag for name, flag in flags.items() if flag.startswith("--") and name not in _OTHERWISE}
    known = set(flags.values())
    named = own | {name: flag for name, options in _OTHERWISE.items() for flag in options[::-1] if flag in known}
    if not named:
        return message
    bare = [name for name in named if "_" in name]  # which no word of English has
    names, underscored = "|".join(named), "|".join(bare) or "(?!)"
    mentioned = rf"(?<=['\"] in )(?:{names})|^(?:{names})(?= is )"  # 'w' in trainable, wrt is empty
    parameter = re.compile(rf"(?<![\w.-])(?:({names})=(?!=)|({underscored}|{mentioned})\b(?![.(=]))")
    parts: list[str] = []
    place = 0
    for found in _outside_quotes(parameter, message):
        if found.start() < place:
            continue
        value = _VALUE.match(message, found.end()) if found[1] else None
        flag = named[found[1] or found[2]]
        parts += [message[place : found.start()], flag, "" if value is None else _spelled(value[0], flag)]
        place = found.end() if value is None else value.end()
    return "".join([*parts, message[place:]])


def _as_cut(call: re.Match[str]) -> str:
    """The command line that does what this call does."""
    try:
        chosen = [ast.literal_eval(text or "None") for text in call.groups()]
    except (ValueError, SyntaxError):  # it is no list of names
        return call[0]
    options = [
        f" {flag} {_words(value)}" for flag, value in zip(("--outputs", "--inputs"), chosen, strict=True) if value
    ]
    return f"refgrad cut MODEL{''.join(options)} -o PART.onnx" if options else "refgrad cut"


def _outside_quotes(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """The matches in `text` that do not begin within quotes."""
    quoted = [found.span() for found in _QUOTED.finditer(text)]
    for found in pattern.finditer(text):
        if not any(first <= found.start() < last for first, last in quoted):
            yield found


def _spelled(text: str, flag: str) -> str:
    """The words of the command line for a Python value, with the space before them: none for True."""
    if text in _FILLED_IN:
        return f" {_EXAMPLES.get(flag, 'VALUE')}"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return f" {text}"
    if value is None:
        return " none"
    return "" if value is True else f" {_words(value)}"


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return shell(",".join(str(number) if name == ANY else f"{name}={number}" for name, number in value.items()))
    if isinstance(value, list | tuple):
        return shell(",".join(str(one).replace(",", "\\,") for one in value))
    return shell(str(value))

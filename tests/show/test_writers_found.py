"""Every place in the code that prints, writes for people, or makes markup, programs and commands is in a table here.

A new place fails these tests until it is in the table. Then give it names made to harm in `test_writers.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.interpreter

ROOT = Path(__file__).parents[2]

# Files that print or write text: the functions of refgrad.escaping that they use, or why they need none.
WRITERS: dict[str, tuple[str, ...] | str] = {
    "refgrad/cli/commands.py": "texts of the help",
    "refgrad/cli/conformance.py": "JSON of ASCII",
    "refgrad/cli/containment.py": "a pipe to the process that prints it",
    "refgrad/cli/listings.py": "what refgrad.show returns, and JSON of ASCII",
    "refgrad/cli/output.py": ("lines", "printable"),
    "refgrad/cli/training.py": "numbers",
    "refgrad/cli/walking.py": "what refgrad.walks returns",
    "refgrad/show/plot.py": "names through refgrad.show.text, without formulas",
    "refgrad/show/tables.py": ("printable",),
    "refgrad/teaching/answers.py": "what an answer prints, which is kept",
    "refgrad/teaching/skeletons.py": "text of refgrad",
    "refgrad/training/estimators.py": "numbers",
    "refgrad/compat/training/notebook.py": "numbers",
    "refgrad/compat/derivative.py": ("printable",),
    "refgrad/walks/page.py": ("csv_cell",),
    "refgrad/walks/text.py": ("printable",),
    "conformance/tools/exporting/export.py": ("is_printable", "json_text"),
    "conformance/tools/exporting/pytest_plugin.py": ("printable",),
    "conformance/tools/exporting/runners/run.py": "JSON of ASCII",
    "conformance/tools/fuzzing/__main__.py": "ASCII",
    "conformance/tools/fuzzing/journey.py": "a file of the system",
    "conformance/tools/fuzzing/reader.py": "paths of the developer",
    "conformance/tools/jets/__main__.py": "operators of refgrad",
    "conformance/locating/reducing.py": ("code", "markdown", "printable"),
    "conformance/reports/__init__.py": "what the modules beside it return",
    "conformance/reports/checks.py": ("markdown", "printable"),
    "conformance/reports/comparisons.py": ("markdown", "printable"),
    "conformance/reports/terminal.py": ("printable", "shell_line"),
    "conformance/judge/running/results.py": ("json_text",),
}
_PRINTING = re.compile(
    r"(^|\.)(print|write_text|writerows?|writelines|set_title|add_task|track|echo|secho)$"
    r"|^(console|terminalreporter|ax)\.(\w+)$|^sys\.(stdout|stderr)\.write$|^_said\.write$|^super\(\)\.write$|^Text$"
)
_NO_PRINTING = re.compile(
    r"^(np|math|op|numpy|torch|jnp|lax|warnings)\.|^ax\.(plot|legend|set_x\w+|set_y\w+|axis)$|^console\.width$"
)

# Names in an f-string with markup that are safe: markup that was made before, text of refgrad, and numbers.
MARKUP = {
    "refgrad/markup.py": {"_TABLE", "style", "tag"},
    "refgrad/show/svg.py": {"_STYLE", "_arrow", "name", "color", "kind", "path", "mark", "kinds", "full", "style", "role",
                            "more", "text", "x"},
    "conformance/reports/pages.py": {
        "''.join(items)", "STYLE", "_TABLES", "style", "kind", "body", "head", "others", "width", "widths[0]",
    },
    "conformance/reports/check_page.py": {
        "_SURE", "_OF_BUILDER", "meanings", "of_builder", "nothing", "shown", "''.join(items)", "pages.kind_of(verdict)",
        "pages.table('Errors by dialect and executor', heads, map(pages.row, rows))",
    },
    "conformance/reports/comparison_page.py": {
        "_WORDS", "_COLOURS", "_side(side)", "picture", "fill", "kind", "name", "side", "way",
        "items", "elements", "figures", "lines", "pages.table('Tensors', _HEADS, rows)",
        "''.join(cells)", "width", "height", "cell", "x * cell", "y * cell", "_bar(error)", "' open' if is_open else ''",
        "_heat_map(grid, size or 1.0, f'{kind} of {tensor.name}')",
    },
}  # fmt: skip
_MARKUP = re.compile(
    r"</?(a|b|br|div|g|h\d|img|marker|p|path|pre|rect|script|span|strong|style|svg|t[dhr]|table|text|title|tspan)\b"
)

# Templates that are filled in, and with what.
FILLED = {
    "refgrad/markup.py": "_CELL: an alignment and a colour",
    "conformance/tools/exporting/export.py": "{tests}: a number",
    "conformance/reports/html.py": "{{data}}: base64, {{faults}}, {{verdict}}: escaped, and text of refgrad; filled in at once",
    "refgrad/walks/page.py": "{{data}}: base64, and text of refgrad; all filled in at once",
}
# Text that is run, or parsed as a model.
RUN = {
    "refgrad/teaching/answers.py": "an answer, which is a program",
    "refgrad/model/native.py": "the parser, for the modules below and for .onnxtxt files",
    "refgrad/show/demo.py": "text of refgrad",
    "refgrad/compat/training/sgd_learning_loss.py": "text of refgrad",
    "refgrad/compat/training/sgd_learning_penalty.py": "text of refgrad, and two numbers",
    "refgrad/compat/utils/onnx_function.py": "text of refgrad, and the name of a type",
    "refgrad/compat/utils/orttraining_helper.py": "text of refgrad",
    "conformance/cases/attention.py": "text of refgrad",
    "conformance/cases/control_flow.py": "text of refgrad",
    "conformance/known/bugs/reading.py": "records of refgrad",
    "conformance/locating/scripts.py": "what the printer wrote of a model, to see if it is the same",
    "conformance/tools/fuzzing/bases.py": "text of refgrad",
    "conformance/tools/fuzzing/commands.py": "text of refgrad",
    "conformance/tools/fuzzing/files/readers.py": "text of refgrad",
    "conformance/strategies/attention.py": "text of refgrad",
}
# Commands that are printed, and what stands in them besides words of refgrad. Each word is quoted for a shell.
COMMANDS = {
    ("refgrad/cli/teaching.py", "chapter"),  # a number
    ("refgrad/cli/teaching.py", "asked.number"),
    ("refgrad/cli/teaching.py", "asked.number + 1"),
    ("refgrad/teaching/judging.py", "number"),
    ("refgrad/teaching/judging.py", "target"),  # of shell_path
    # of shlex.quote, and of shell_line where it is shown
    ("conformance/judge/running/results.py", "_options([*options, *self._around()])"),
    ("conformance/judge/running/results.py", "_options([*self._selecting(row.case), *sides, *self._around()])"),
}
_COMMAND = re.compile(
    r"(?<!>)\brefgrad (conformance|grad|run|check|teach|show|walk|explain|recipe|train|nan|compare|reduce|preflight)\b"
)


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its file."""
    files = [file for top in ("refgrad", "backends", "conformance") for file in sorted((ROOT / top).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@cache
def nodes(file: str) -> list[ast.AST]:
    """The calls, f-strings and imports of a file."""
    kinds = (ast.Call, ast.JoinedStr, ast.Import, ast.ImportFrom)
    return [node for node in ast.walk(trees()[file]) if isinstance(node, kinds)]


@cache
def calls(file: str) -> list[tuple[ast.Call, str]]:
    """Each call in a file, and what is called."""
    return [(node, dotted(node.func)) for node in nodes(file) if isinstance(node, ast.Call)]


def dotted(node: ast.expr) -> str:
    """The names of what is called, as in "stdout().print"."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
        case ast.Call():
            return f"{dotted(node.func)}()"
        case _:
            return "?"


def strings(file: str) -> Iterator[list[str | ast.FormattedValue]]:
    """Each f-string: its texts and its values, in order."""
    for node in nodes(file):
        if isinstance(node, ast.JoinedStr):
            yield [str(one.value) if isinstance(one, ast.Constant) else one for one in node.values]


def texts_of(string: list[str | ast.FormattedValue]) -> list[str]:
    return [one for one in string if isinstance(one, str)]


def values_of(string: list[str | ast.FormattedValue]) -> list[ast.FormattedValue]:
    return [one for one in string if isinstance(one, ast.FormattedValue)]


def from_escaping(file: str) -> set[str]:
    return {
        name.name
        for node in nodes(file)
        if isinstance(node, ast.ImportFrom) and node.module == "refgrad.escaping"
        for name in node.names
    }


def test_every_writer_is_known() -> None:
    found = {
        file for file in trees()
        if any(_PRINTING.search(what) and not _NO_PRINTING.search(what) for _, what in calls(file))
    }  # fmt: skip
    assert found == set(WRITERS), "say here how each escapes the names of a model, and try it in test_writers.py"


@pytest.mark.parametrize("file", [file for file, used in WRITERS.items() if isinstance(used, tuple)])
def test_a_writer_escapes_for_its_medium(file: str) -> None:
    assert set(WRITERS[file]) <= from_escaping(file)


def test_nobody_else_escapes() -> None:
    """One function per medium: no module has one of its own."""
    for file in trees():
        if file in (
            "refgrad/escaping.py",
            "conformance/tools/fuzzing/commands.py",
        ):  # the latter looks for what escaped
            continue
        modules = {
            name for node in nodes(file) if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        }  # fmt: skip
        assert not modules & {"html", "xml.sax.saxutils", "string.templatelib", "markupsafe", "pipes"}, file
        assert not any(what.endswith(".isprintable") for _, what in calls(file)), file
    users = {file for file in trees() if any(what.startswith("shlex.") for _, what in calls(file))}
    assert users == {"refgrad/escaping.py", "conformance/judge/running/results.py"}


def test_values_in_markup_are_escaped() -> None:
    for file in trees():
        for string in strings(file):
            if not any(map(_MARKUP.search, texts_of(string))):
                continue
            for value in values_of(string):
                text = ast.unparse(value.value)
                safe = isinstance(value.value, ast.Call) and ast.unparse(value.value.func) in ("html", "_arrow")
                number = value.format_spec is not None and ast.unparse(value.format_spec).rstrip("'\"").endswith("f")
                assert safe or number or text in MARKUP.get(file, ()), (file, text, "escape it: refgrad.escaping.html")


def test_no_template_is_filled_with_text() -> None:
    found = set()
    for file in trees():
        for call, what in calls(file):
            first = call.args[0] if call.args else None
            marked = (
                isinstance(first, ast.Constant)
                and isinstance(first.value, str)
                and re.search(r"[{}$%]\w|\{\{", first.value)
            )
            placed = isinstance(first, ast.Name) and "PLACE" in first.id
            template = (
                what.endswith((".format", ".format_map", ".substitute", ".safe_substitute")) or what == "Template"
            )
            substituted = re.search(r"PLACE\w*\.sub$", what)
            if template or substituted or (what.endswith(".replace") and (marked or placed)):
                found.add(file)
    assert found == set(FILLED), (
        "give the data as one literal, or in a file: a text that is filled in is filled in again"
    )


def test_what_is_run_is_known() -> None:
    running = re.compile(
        r"^(exec|eval|compile)$|(^|\.)parse_(model|graph|function|node)$|^(os\.)?(system|popen)$|^__import__$"
    )
    assert {file for file in trees() if any(running.search(what) for _, what in calls(file))} == set(RUN)
    for file in trees():
        for call, what in calls(file):
            assert not any(keyword.arg == "shell" for keyword in call.keywords), (file, what)


def test_commands_are_quoted_for_a_shell() -> None:
    for file in trees():
        for string in strings(file):
            in_command = False
            for part in string:
                if isinstance(part, str):
                    in_command = bool(_COMMAND.search(part)) or (in_command and not re.search(r"[`\n]", part))
                elif in_command:
                    said = ast.unparse(part.value)
                    is_quoted = re.match(r"shell(_path|_line)?\(", said)
                    assert is_quoted or (file, said) in COMMANDS, (file, said, "quote it: refgrad.escaping.shell")


def test_the_tables_have_no_more_than_there_is() -> None:
    marked = {file for file in trees() for one in strings(file) if any(map(_MARKUP.search, texts_of(one)))}
    assert set(MARKUP) <= marked
    assert {file for file, _ in COMMANDS} <= set(trees())


def test_pages_make_no_html_of_text() -> None:
    """The scripts of the pages make elements, and give them text: none of them parses HTML or runs text."""
    for file in ("refgrad/walks/page.js", "refgrad/walks/interpreter.js", "conformance/reports/page.html"):
        script = (ROOT / file).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|javascript:", script
        )
        for line in script.splitlines():
            if "textContent = " in line and "${" in line:
                assert "plain(" in line or re.search(r"\$\{(plural|counted|show|position|value\.type)\b", line), (
                    file,
                    line,
                )

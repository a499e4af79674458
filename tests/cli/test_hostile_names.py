"""Names made to harm, in every place of a model: no command prints or writes one as it is, no report takes one for its own."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
import typer
from commands import Command, commands
from onnx import ModelProto, TensorProto, helper, numpy_helper

import refgrad
from refgrad import cli
from refgrad.cli.output import Files
from refgrad.conformance.reports import html

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

TITLE, HIDE, TURN, ERASE = (
    "\x1b]0;owned\x07",
    "\x00",
    "\u202e",
    "\x9b2J",
)  # sets a title, ends a string, turns text round, erases
FORGED = "\nrefgrad: forged\r"
MARKUP = "[red]m[/red][/][link=x]<script>alert(1)</script><b a='\"`|&amp;{}"
HOSTILE = f"{TITLE}{HIDE}{TURN}{ERASE}{FORGED}{MARKUP}\u2028\ud7ff\U000e0041"
IN_FILES = HOSTILE.replace(HIDE, "").replace("/", "")  # what a file can be called


def named(place: str) -> str:
    """A hostile name that no other place has."""
    return f"{place}{HOSTILE}"


def model(refused: bool) -> ModelProto:
    """y = f(x·w) where f is a function, or, where it is to be `refused`, an operator that nobody knows."""
    x, y, w, z, n, d = map(named, ("x", "y", "w", "z", "n", "d"))
    domain = named("domain")
    nodes = [
        helper.make_node("Mul", [x, w], [z], n, doc_string=named("doc")),
        helper.make_node(named("op"), [z], [y], named("call"), domain=domain),
    ]
    if refused:
        nodes[1].attribute.append(helper.make_attribute(named("a"), named("s")))
        nodes[1].attribute.append(helper.make_attribute(named("list"), [named("s"), named("t")]))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        named("graph"),
        [value(x, TensorProto.FLOAT, [d, 3])],
        [value(y, TensorProto.FLOAT, [d, 3])],
        [numpy_helper.from_array(np.ones(3, np.float32), w)],
        doc_string=named("doc"),
        value_info=[value(z, TensorProto.FLOAT, [d, 3])],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
    made = helper.make_model(graph, ir_version=10, opset_imports=imports, producer_name=named("me"), domain=named("md"))
    made.doc_string = named("doc")
    made.metadata_props.add(key=named("key"), value=named("value"))
    if not refused:
        a, b = named("a"), named("b")
        body = [helper.make_node("Tanh", [a], [b], named("n"))]
        made.functions.append(helper.make_function(domain, named("op"), [a], [b], body, imports[:1]))
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a hostile name, which is the current one: a model, one that is refused, its feeds."""
    made = tmp_path / IN_FILES[:60]
    made.mkdir()
    for refused in (False, True):
        onnx.save(model(refused), made / f"{IN_FILES}{refused}.onnx")
    with zipfile.ZipFile(made / "feeds.npz", "w") as archive, archive.open(f"{named('x')}.npy", "w") as entry:
        np.lib.format.write_array(entry, np.ones((2, 3), np.float32))
    monkeypatch.chdir(made)
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))  # made once: it is most of the time of a call
    return made


def assert_harmless(text: str, where: object) -> None:
    """No character that a terminal or an editor obeys but the end of a line, and no line that a name forged."""
    odd = {letter for letter in text if not letter.isprintable() and letter != "\n"}
    assert not odd, (where, sorted(map(ascii, odd)), text[:500])
    assert "\nrefgrad: forged" not in f"\n{text}", (where, text[:500])


class Tags(HTMLParser):
    """Counts the elements of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def assert_written_harmless(file: Path) -> None:
    if file.suffix in (".onnx", ".data", ".npz"):
        return
    text = file.read_bytes().decode()
    assert_harmless(text, file.suffix)
    match file.suffix:
        case ".json":
            json.loads(text)
        case ".xml":
            root = ElementTree.fromstring(text)
            assert {one.tag for one in root.iter()} <= {"testsuites", "testsuite", "testcase", "failure", "skipped"}
        case ".html":
            assert Tags(text).found == Tags(html.TEMPLATE.read_text(encoding="utf-8")).found
        case ".md":
            bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", text)
            assert not re.search(r"<\w|\]\(|\[\w", bare), text
        case ".dot" | ".gv":
            outside = re.sub(r'"(\\.|[^"\\])*"', "", text)
            assert "script" not in outside
            assert "\\n" not in outside


WRONG = (("--wrt", named("q")), ("--outputs", named("q")), ("--of", f"{named('q')}[0]"), ("--feeds", IN_FILES[:80]))
MORE = {
    "conformance run": (("--workers", "1", "--oracle", "differences", "--builder", "refgrad"),),
    "run": (("--trace",), ("--feeds", "feeds.npz")),
    "recipe sensitivity": (("--feeds", "feeds.npz"),),
}
NOT_READING = {"conformance export", "conformance mutants", "demo"}  # nobody's model, nobody's names


def calls(command: Command, folder: Path) -> Iterator[list[str]]:
    """The ways to call a command on the models, each writing to other files."""
    if not command.of_role(Files.MODEL):
        yield [*command.name.split(), *(named("x") for _ in range(command.name == "explain"))]
        return
    extras = [*command.variants, *MORE.get(command.name, ())]
    extras += [
        (option,) for name, option in (("as_json", "--json"), ("verbose", "--verbose")) if name in command.parameters
    ]
    extras += [wrong for wrong in WRONG if wrong[0][2:] in command.parameters]
    if command.name == "conformance run":
        extras = [(*MORE[command.name][0], *extra) for extra in ((), *extras[2:])]
    for refused in (False, True):
        for number, extra in enumerate(extras):
            given = dict.fromkeys(command.of_role(Files.MODEL), folder / f"{IN_FILES}{refused}.onnx")
            end = f"{refused}{number}{IN_FILES[-70:]}"
            for name in command.of_role(Files.WRITTEN_MODEL):
                if "--feeds" not in extra or name != "output":
                    given[name] = folder / f"{end}.onnx"
            for name in command.of_role(Files.JOURNAL):
                given[name] = folder / f"{end}.jsonl"
            written: tuple[str, ...] = ()
            if command.name == "conformance run":
                written = tuple(word for kind in ("json", "xml", "md", "html") for word in ("-o", f"{end}.{kind}"))
            elif command.of_role(Files.WRITTEN) and "--json" not in extra:
                kinds = {"run": "npz", "check": "md", "compare": "md"}
                written = ("-o", f"{end}.{'dot' if '--dot' in extra else kinds.get(command.name, 'txt')}")
            yield command.words(given, (*extra, *written))
            if command.name == "show":
                yield command.words(given, extra)


@pytest.mark.parametrize("command", [one for one in commands() if one.name not in NOT_READING], ids=str)
def test_no_command_prints_or_writes_a_hostile_name_as_it_is(command: Command, folder, capsys):
    if command.name == "conformance report":
        pytest.skip("tested with what `conformance run` writes")
    for words in calls(command, folder):
        cli.main(words)
        assert_said_harmless(capsys, words)
    if command.name == "conformance run":
        for made in sorted(folder.glob("*.json")):
            assert (
                cli.main(
                    [
                        "conformance",
                        "report",
                        made.name,
                        *(f"-oagain{made.name}.{kind}" for kind in ("xml", "md", "html")),
                    ]
                )
                == 0
            )
            assert_said_harmless(capsys, made)
    files = [
        file for file in folder.iterdir() if file.suffix in (".json", ".jsonl", ".xml", ".md", ".html", ".dot", ".txt")
    ]
    for file in files:
        assert_written_harmless(file)
    assert len(files) >= {"show": 4, "conformance run": 14}.get(command.name, 0)


def assert_said_harmless(capsys: pytest.CaptureFixture[str], words: object) -> None:
    said = capsys.readouterr()
    assert_harmless(said.out, words)
    assert_harmless(said.err, words)
    assert "unexpected" not in said.err, words


@pytest.mark.parametrize(
    "words", [("run",), ("check",), ("preflight",), ("show",), ("check", "--wrt", "q")], ids=" ".join
)
def test_markup_in_a_name_is_not_obeyed(words, tmp_path, capsys, monkeypatch):
    name = "[red]:smile:[/][link=u]"
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> m (float[2] x) => (float[2] y) { y = Tanh(x) }'
    )
    made.graph.output[0].name = made.graph.node[0].output[0] = name
    made.graph.input[0].name = made.graph.node[0].input[0] = made.graph.node[0].name = f"{name}x"
    onnx.save(made, tmp_path / "m.onnx")
    cli.main([words[0], str(tmp_path / "m.onnx"), *words[1:], *(("--verbose",) if words[0] == "preflight" else ())])
    said = capsys.readouterr()
    assert name in (said.out if words[0] != "preflight" else f"{said.out}{name}") + said.err
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("write", [refgrad.onnx_simple_text_plot, refgrad.onnx_text_plot_io, refgrad.to_dot])
def test_a_text_of_a_hostile_model_has_the_lines_of_a_harmless_one(write, refused):
    made = model(refused)
    text = write(made)
    assert_harmless(text, write)
    plain = write(refgrad.onnx_rename_names(made))
    assert len(text.splitlines()) == len(plain.splitlines())

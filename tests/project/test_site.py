"""The documentation site: what docs/site/assemble.py writes, and the built site where REFGRAD_SITE names its folder."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx.parser
import onnx.printer
import pytest

import refgrad
from refgrad.conformance import Case
from refgrad.escaping import markdown
from refgrad.tables.operators import operators as every_operator
from refgrad.tables.registry import CONTROL_FLOW_RULES, RULES

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "site"
SOME = (
    "Relu",
    "Softmax",
    "ConvInteger",
    "Loop",
    "com.microsoft.Gelu",
    "com.microsoft.nchwc.Conv",
    "HardSwish",
    "MatMulInteger",
)
MODULES = ("assemble", "built", "navigation", "operators", "scripts", "text")


@pytest.fixture(scope="module")
def modules():
    """The modules of docs/site, as its scripts have them."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def site(modules):
    """The whole site, with the pages of some operators; the links of the others' pages are left out of the index."""
    pytest.importorskip("matplotlib")
    return modules["assemble"].assemble(SOME)


def test_every_operator_with_a_rule_has_a_page(modules):
    named = {one.operator for one in modules["operators"].with_pages()}
    rules = {f"{domain}.{name}" if domain else name for domain, name in (*RULES, *CONTROL_FLOW_RULES)}
    bodies = {one.operator for one in every_operator() if one.derivative == "function"}
    assert rules <= named
    assert named == rules | bodies
    index = modules["operators"].index((ROOT / "docs" / "operators.md").read_text())
    found = re.findall(r"^\| \[(\S+)\]\((\S+)\.md\) \|", index, re.MULTILINE)
    assert {target for _, target in found} == {name for name in named if not name.startswith("my.")}  # of an example
    assert all(shown.replace("\u200b", "") == target for shown, target in found)


def test_a_page_says_what_the_code_and_the_results_say(site):
    page = site.pages["operators/Softmax.md"]
    assert "dx = y·(dy − Σ_axis dy·y)" in page
    assert "| input | `input` | single |" in page
    assert "| `axis` | int | -1 |" in page
    assert "Softmax-2x3x4-axis=-1-static" in page
    assert "| refgrad | numpy |" in page
    assert "comparisons are right (differences" in page
    relu = site.pages["operators/Relu.md"]
    assert "| where | order | refgrad | torch | torch's function | ONNX Runtime | why |" in relu
    assert "| x = 0 | 1 | 0 | 0 | `relu(x)` | 0 | the result is as flat as for x < 0 |" in relu
    assert "Where an input is NaN:\n\n| where | refgrad | torch | ONNX Runtime | why |" in relu
    assert "node by node" in relu
    assert "no gradient for it" in site.pages["operators/HardSwish.md"]
    assert "no case of this operator" in site.pages["operators/com.microsoft.nchwc.Conv.md"]


def test_the_pictures_are_those_of_both_dialects(site, modules):
    case = modules["operators"].first_case("Softmax")
    for dialect in ("onnx", "ort"):
        drawn = site.files[f"operators/pictures/Softmax.{dialect}.svg"].decode()
        assert drawn == refgrad.to_svg(refgrad.gradient(case.model, case.wrt, case.outputs, dialect=dialect))


@pytest.mark.parametrize("name", ["Softmax", "com.microsoft.Gelu"])
def test_the_example_of_a_page_prints_what_the_page_says(site, name):
    page = site.pages[f"operators/{name}.md"]
    [code, said] = re.search(r"```python\n(.*?)```\n\nIt prints:\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    start = "import numpy as np\nnp.set_printoptions(precision=4, suppress=True)\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == said.split()


def test_a_wrong_gradient_is_not_shown(modules, monkeypatch):
    """A rule that is wrong by a factor: the page is refused, and the sentence names the case."""
    case = modules["operators"].first_case("Tanh")
    right = RULES["", "Tanh"]

    def wrong(op, *arguments, **named):
        return op.Mul(right.function(op, *arguments, **named), 2.001)

    monkeypatch.setitem(RULES, ("", "Tanh"), dataclasses.replace(right, function=wrong))
    with pytest.raises(ValueError, match=r"The example of Tanh-.* is contradicted"):
        modules["operators"].example(case)


def test_no_link_leads_nowhere_and_one_that_does_is_noticed(site, modules):
    assert not site.faults()
    there = "A [page](b.md), a [heading](b.md#what-it-is), a `[span](c.md)`.\n\n```\n[code](d.md)\n```\n"
    missing = modules["text"].missing
    assert not missing({"a.md": there, "b.md": "## What it is\n"}, [])
    assert len(missing({"a.md": there, "b.md": "## What it was\n"}, [])) == 1
    assert len(missing({"a.md": there}, [])) == 2
    assert not missing({"a.md": "![x](p/a.svg)"}, ["p/a.svg"])


def test_links_to_files_outside_of_the_site_become_text_or_copies(modules):
    moved, files = modules["assemble"].moved, {}
    places = {"docs/a.md": "a.md", "README.md": "overview.md"}
    page = (
        "[r](../README.md#start) [code](../refgrad/errors.py) [s](../examples/training/losses.py) [w](https://onnx.ai)"
    )
    assert moved(page, "docs/a.md", places, files) == (
        "[r](overview.md#start) code [s](files/examples/training/losses.py) [w](https://onnx.ai)"
    )
    assert list(files) == ["files/examples/training/losses.py"]


def test_every_page_of_the_repository_is_in_the_site_and_in_its_navigation(site):
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md", "operators.md"}
    assert pages <= {Path(path).name for path in site.pages}
    start = site.pages["index.md"]
    for name in pages:
        assert re.search(rf"^(.* <)?{name.removesuffix('.md')}>?$", start, re.MULTILINE), name


def test_new_pages_are_picked_up(modules):
    trees = modules["navigation"].trees
    text = trees(["walking", "course/README", "course/chain", "new"], ["course/README", "course/chain"])
    assert "Walking through a backward pass <walking>" in text
    assert re.search(r":caption: Course\n\ncourse/README\ncourse/chain\n", text)
    assert re.search(r":caption: Further pages\n\nnew\n", text)
    assert "Course" not in trees(["walking"])


def test_nothing_in_the_site_is_hostile(site, modules):
    for path, content in site.files.items():
        if path.endswith(".svg"):
            text = content.decode()
            ElementTree.fromstring(text)
            assert not re.search(r"<script|<foreignObject|javascript:|<[^>]*\son\w+=", text, re.IGNORECASE), path
    made = (page for path, page in site.pages.items() if path.startswith(("operators/", "examples/")))
    for page in made:
        prose = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", page, flags=re.DOTALL | re.MULTILINE)
        prose = re.sub(r"`[^`\n]+`", "", prose)
        assert not re.search(r"(?<!\\)</?[a-zA-Z][\w\s=\"'-]*>", prose)


def test_a_model_cannot_end_its_block_or_write_html(modules):
    fence = modules["text"].fence
    block = fence("```\n</pre><script>alert(1)</script>\n````", "python")
    assert block.startswith("`````python\n")
    assert block.endswith("\n`````\n")
    assert "<script>" not in markdown("<script>alert(1)</script>").replace("\\<", "")


def test_examples_have_what_they_print_and_their_pictures(site, modules):
    for name in modules["scripts"].EXAMPLES:
        page = site.pages[f"examples/{name}.md"]
        assert "## What it prints" in page
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page):
            assert f"examples/{target}" in site.files
    assert "532.55" in site.pages["examples/regression.md"]
    assert {path.stem for path in (ROOT / "examples" / "training").glob("*.py")} == set(modules["scripts"].EXAMPLES)


def test_the_examples_of_the_guide_are_executed(site):
    assert "x_grad" in site.pages["given_model.md"]
    assert "```text\nright\n```" in site.pages["given_model.md"]


def test_the_site_begins_with_the_contents(site):
    assert "| you have | you want | read |" in site.pages["index.md"]


def test_an_example_that_fails_fails_the_site(modules):
    assemble = modules["assemble"]
    with pytest.raises(assemble.SiteError, match=r"An example of docs/a\.md fails: ZeroDivisionError"):
        assemble.executed("```python\n1 / 0\n```\n", "docs/a.md")
    page = assemble.executed("```python\na = 1\n```\n\n```python\nprint(a + 1)\n```\n", "docs/a.md")
    assert page.endswith("print(a + 1)\n```\n\n```text\n2\n```\n")


def test_a_script_that_fails_fails_the_site(modules, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('no such thing')")
    with pytest.raises(RuntimeError, match=r"script\.py fails: no such thing"):
        modules["scripts"].printed(script)


def test_literals_give_the_arrays_back(modules):
    literal = modules["operators"]._literal
    for array in (
        np.float32([[0.1, -2.5], [np.inf, np.nan]]),
        np.zeros((0, 3), np.float64),
        np.array([True, False]),
        np.array(7, np.int64),
        np.array([b"a", "b"], object),
    ):
        again = eval(literal(array), {"np": np})
        assert again.dtype == array.dtype
        assert again.shape == array.shape
        np.testing.assert_array_equal(again, array)


def test_a_case_whose_text_says_something_else_has_no_example(modules, monkeypatch):
    """As if the printer of onnx left an attribute out."""
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) {{ y = Elu{}(x) }}'
    model, other = onnx.parser.parse_model(text.format("<alpha = 2.0>")), text.format("")
    case = Case("odd", model, {"x": np.ones(2, np.float32)})
    assert modules["operators"].example(case) is not None
    monkeypatch.setattr(onnx.printer, "to_text", lambda printed: other if printed is model else text)
    assert modules["operators"].example(case) is None


def test_the_folder_must_not_exist(modules, tmp_path, capsys, monkeypatch):
    assemble = modules["assemble"]
    monkeypatch.setattr(assemble, "assemble", lambda: assemble.Site({"index.md": "# A\n"}, {"x/y.svg": b"<svg/>"}))
    assert assemble.main([str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "x" / "y.svg").read_bytes() == b"<svg/>"
    assert assemble.main([str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<a href="b.html">', "there is no b.html"),
        ('<a href="#here">', "no such anchor"),
        ('<img src="https://example.com/a.png">', "from elsewhere"),
        ('<link href="//example.com/a.css">', "from elsewhere"),
        ('<p onclick="f()">', "runs code"),
        ('<a href="javascript:f()">', "links to javascript"),
        ('<a href="https://onnx.ai"><a href="a.html#there"><p id="there">', ""),
    ],
)
def test_the_check_of_a_built_site_notices(modules, tmp_path, page, fault):
    (tmp_path / "a.html").write_text(page)
    found, _ = modules["built"].faults(tmp_path)
    assert len(found) == bool(fault)
    assert fault in "".join(found)


@pytest.mark.skipif("REFGRAD_SITE" not in os.environ, reason="`nox -s docs` builds the site and names its folder")
def test_the_built_site_has_every_page_and_loads_nothing_from_elsewhere(modules):
    root = Path(os.environ["REFGRAD_SITE"])
    found, count = modules["built"].faults(root)
    assert not found
    assert count > 10_000
    for one in modules["operators"].with_pages():
        assert (root / "operators" / f"{one.operator}.html").is_file()
    assert (root / "reference" / "refgrad.html").read_text().count('id="refgrad.gradient"') == 1


def test_a_warning_fails_the_build(modules, tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    source = tmp_path / "source"
    (source / "_static").mkdir(parents=True)
    shutil.copy(FOLDER / "conf.py", source)
    shutil.copy(FOLDER / "site.css", source / "_static")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(source), str(tmp_path / "site")]
    (source / "index.md").write_text("# A\n\n[there](#a)\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert modules["built"].faults(tmp_path / "site")[0] == []
    (source / "index.md").write_text("# A\n\n[nowhere](b.md)\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0

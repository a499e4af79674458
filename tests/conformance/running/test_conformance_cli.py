"""`refgrad conformance`: what the command prints and writes, and a message for every wrong use."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from refgrad import conformance
from refgrad.cli import main
from refgrad.cli.conformance import _bytes_of, one_case
from refgrad.conformance.judge.running import sources
from refgrad.conformance.judge.running.results import Results, load
from refgrad.conformance.judge.running.runner import MEMORY
from refgrad.conformance.reports.html import data_of
from refgrad.model.writing import fingerprint

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]


def run(*arguments):
    return main(["conformance", *map(str, arguments)])


@pytest.fixture
def one(capsys):
    """The name of one case."""
    assert run("cases", "--ops", "Relu", "--dtype", "float32") == 0
    return capsys.readouterr().out.split()[0]


def test_what_is_right_exits_with_0_and_writes_every_report(tmp_path, capsys, one):
    files = [tmp_path / f"r{suffix}" for suffix in (".json", ".xml", ".md", ".html")]
    outputs = [part for file in files for part in ("-o", file)]
    assert run("run", "--case", one, "--workers", 1, *outputs) == 0
    assert "right" in capsys.readouterr().out
    assert all(file.stat().st_size for file in files)
    results = load(files[0])
    assert [row.verdict for row in results.rows] == ["right", "right"]
    again = tmp_path / "again.html"
    assert run("report", files[0], "-o", again) == 0
    assert one in [case[0] for case in data_of(again.read_text())["cases"]]


def test_a_model_of_ones_own(tmp_path, capsys):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x) => (float[N, 3] y) { a = Tanh(x) y = Mul(a, x) }'
    )
    onnx.save(model, tmp_path / "mine.onnx")
    assert run("run", "--source", tmp_path / "mine.onnx", "--workers", 1) == 0
    np.savez(tmp_path / "feeds.npz", x=np.ones((2, 3), np.float32))
    assert run("run", "--source", tmp_path / "mine.onnx", "--feeds", tmp_path / "feeds.npz", "--workers", 1) == 0
    assert "right" in capsys.readouterr().out


def test_the_command_that_is_printed_comes_to_the_same_verdict(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "helpers")
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[N, 3] x) => (float[N, 3] y) { a = Tanh(x) y = Mul(a, x) }'
    )
    onnx.save(model, "my model.onnx")
    np.savez("my feeds.npz", x=np.linspace(0.1, 0.6, 6, dtype=np.float32).reshape(2, 3))
    common = ("--builder", "foreign:doubled", "--workers", 1, "--oracle", "differences,reference")
    assert run("run", "--source", "my model.onnx", "--feeds", "my feeds.npz", *common, "--seed", 3, "-o", "a.json") == 1
    printed = capsys.readouterr().out
    command = shlex.split(printed.partition("To repeat the first fault: ")[2].splitlines()[0])
    assert command[:2] == ["refgrad", "conformance"]
    assert run(*command[2:], "-o", "b.json") == 1
    before, after = (load(tmp_path / name) for name in ("a.json", "b.json"))
    assert before.rows == after.rows
    assert before.cases == after.cases


def test_what_is_wrong_exits_with_1_until_a_limitation_explains_it(tmp_path, capsys, one, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from onnx import helper\nimport refgrad\n"
        "def half(model, wrt, outputs):\n"
        "    made = refgrad.gradient(model, wrt, outputs)\n"
        "    made.graph.node[-1].op_type = 'Add'\n"
        "    return made\n"
    )
    name = ("run", "--case", "Mul-*static*", "--ops", "Mul", "--builder", "mine:half", "--workers", 1)
    assert run(*name) == 1
    assert "refgrad conformance run --case" in capsys.readouterr().out
    known = tmp_path / "known.toml"
    known.write_text('[[limitation]]\nbuilder = "mine:half"\noperator = "Mul"\nreason = "it adds"\n')
    assert run(*name, "--limitations", known) == 0
    assert "known failures" in capsys.readouterr().out
    assert run("run", "--case", one, "--workers", 1, "--limitations", known) == 0  # it may be about what was not asked
    known.write_text('[[limitation]]\noperator = "Relu"\nverdict = "wrong"\nreason = "it was"\n')
    assert run("run", "--case", one, "--workers", 1, "--limitations", known) == 1
    assert "no longer holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8G", MEMORY),
        ("8192", MEMORY),
        ("8 GiB", MEMORY),
        ("0", 0),
        ("0G", 0),
        ("500M", 500 << 20),
        ("800 MB", 800_000_000),
    ],
)
def test_a_memory_limit_has_a_unit_or_is_in_mebibytes(text, size):
    assert _bytes_of(text) == size


WRONG = [
    (("run", "--ops", "Cnov"), "There is no case of an operator 'Cnov'. Did you mean 'Conv'"),
    (("run", "--builder", "torch"), "There is no builder 'torch'"),
    (("run", "--builder", "nowhere.at:all"), "nowhere"),
    (("run", "--backend", "nunpy"), "There is no executor 'nunpy'. Did you mean 'numpy'"),
    (("run", "--ops", "relu"), "Did you mean 'Relu'?"),
    (("run", "--ops", ""), "--ops '' names no operator. Name one, or leave --ops out."),
    (("mutants", "--ops", ","), "--ops ',' names no operator"),
    (("run", "--backend", ","), "--backend ',' names no executor"),
    (("run", "--backend", "ORT-CPU"), "Did you mean 'ort-cpu'?"),
    (
        ("run", "--feeds", "nowhere.npz"),
        "--feeds has the inputs of one model. Give that model too, as --source MODEL.onnx",
    ),
    (("run", "--journal", "."), "'.' is a folder. Name a file for the journal."),
    (("run", "--seconds", "0"), "--seconds must be a number of seconds above 0, not 0"),
    (("run", "--seconds", "nan"), "--seconds must be a number of seconds above 0, not nan"),
    (("run", "--seconds", "inf"), "--seconds must be a number of seconds above 0, not inf"),
    (("run", "--memory", "-1"), "--memory '-1' is not a size. Give a number of MiB, or one like 500M or 8G"),
    (("run", "--memory", "much"), "--memory 'much' is not a size"),
    (("run", "--memory", "1K"), "--memory '1K' is not a size"),
    (("run", "--memory", "0.5"), "--memory '0.5' is not a size"),
    (("run", "--memory", "nan"), "--memory 'nan' is not a size"),
    (("run", "--memory", "99999999999999999"), "--memory must be an integer that is not negative and at most"),
    (("run", "--oracle", "delphi"), "--oracle 'delphi' is not known"),
    (("run", "--opset", "28-13"), "--opset '28-13' is not an opset"),
    (("cases", "--opset", "21,22"), "--opset '21,22' is not an opset"),
    (("export", "new", "--opset", "21,22"), "--opset '21,22' is not an opset"),
    (("run", "--dtype", ","), "--dtype ',' names no float type"),
    (("run", "--opset", "99"), "--opset '99' is not an opset"),
    (("run", "--dtype", "float31"), "--dtype 'float31' is not known. Did you mean 'float32'?"),
    (("run", "--values", "rough"), "--values 'rough' is not known"),
    (("run", "--case", "nothing*"), "No case matches --case 'nothing*'. A name begins with an operator"),
    (("cases", "--case", ""), "No case matches --case ''. A name begins with an operator"),
    (("run", "--case", "tanh-2x3*"), "The nearest are 'Tanh-2x3-static-"),
    (("cases", "--case", "Tanhh-2x3"), "The nearest are 'Tanh-2x3-static-"),
    (
        ("cases", "--case", "Tanh-2x3-static-opset13-float32"),
        "There is one with --opset 13. The nearest are 'Tanh-2x3-static-",
    ),
    (("cases", "--case", "Tanh-2x3-*-float16"), "There is one with --dtype float16. The nearest are"),
    (("cases", "--case", "Tanh-2x3-*", "--ops", "Relu"), "Tanh has one, but --ops Relu leaves it out."),
    (("run", "--source", "nowhere"), "There is no source 'nowhere'"),
    (("run", "--resume"), "--resume needs a journal"),
    (("run", "--limitations", "nowhere.toml"), "nowhere.toml"),
    (("run", "-o", "report.pdf"), "there is no report '.pdf'"),
    (("run", "--ops", "Relu", "--cluster", "tcp://127.0.0.1:1"), "No Dask scheduler answers"),
    (("report", "nowhere.json", "-o", "r.md"), "nowhere.json"),
    (("mutants", "--ops", "Cnov"), "Cnov"),
    (("export", "{tmp}"), "exists. Give the name"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_wrong_use_is_a_message_and_exits_with_2(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert run(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_case_folder_without_outputs_is_named(tmp_path, capsys):
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { y = Tanh(x) }'
    )
    data = tmp_path / "cases" / "test_mine" / "test_data_set_0"
    data.mkdir(parents=True)
    onnx.save(model, data.parent / "model.onnx")
    (data / "input_0.pb").write_bytes(numpy_helper.from_array(np.ones(2, np.float32)).SerializeToString())
    assert run("run", "--source", tmp_path / "cases", "--workers", 1) == 2
    assert "test_mine" in capsys.readouterr().err
    (data / "output_0.pb").write_bytes(numpy_helper.from_array(np.tanh(np.ones(2, np.float32))).SerializeToString())
    assert run("run", "--source", tmp_path / "cases", "--workers", 1) == 0


def test_a_list_may_be_repeated(tmp_path, capsys, one):
    words = ("--builder", "refgrad", "--builder", "refgrad:ort", "--backend", "numpy", "--backend", "onnx.reference")
    words += ("--oracle", "differences", "--oracle", "reference", "--dtype", "float32", "--values", "smooth")
    assert run("run", "--case", one, *words, "--workers", 1, "-o", tmp_path / "r.json") == 0
    results = load(tmp_path / "r.json")
    assert len(results.rows) == 4
    assert results.settings["oracles"] == ["differences", "reference"]
    capsys.readouterr()
    assert run("cases", "--ops", "Relu", "--ops", "ai.onnx.Tanh,Neg", "--every", 99) == 0
    assert {line.partition("-")[0] for line in capsys.readouterr().out.splitlines()} == {"Relu", "Tanh", "Neg"}


def test_a_new_run_says_that_there_is_no_journal_to_resume(tmp_path, capsys, one):
    journal = tmp_path / "journal"
    assert run("run", "--case", one, "--workers", 1, "--journal", journal, "--resume") == 0
    assert "yet. A new run begins." in capsys.readouterr().err
    assert run("run", "--case", one, "--workers", 1, "--journal", journal, "--resume") == 0
    assert not capsys.readouterr().err


def test_who_is_named_twice_is_asked_once(capsys, one):
    assert run("run", "--case", one, "--builder", "refgrad,refgrad", "--backend", "numpy, numpy", "--workers", 1) == 0
    assert "0 faults in 1 verdict (1 case of 1 operator)" in capsys.readouterr().out


def test_malformed_journals_are_refused_with_the_line(tmp_path, capsys, one):
    journal = tmp_path / "journal.jsonl"
    assert run("run", "--case", one, "--workers", 1, "--journal", journal) == 0
    assert run("run", "--case", one, "--workers", 1, "--journal", journal) == 2
    assert "--resume" in capsys.readouterr().err
    assert run("run", "--case", one, "--seed", 1, "--journal", journal, "--resume") == 2
    assert "seed was 0, is 1" in capsys.readouterr().err
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n")
    assert run("run", "--case", one, "--journal", journal, "--resume") == 2
    assert "line 2" in capsys.readouterr().err


def test_mutants_of_an_operator(tmp_path, capsys):
    assert run("mutants", "--ops", "Tanh", "-o", tmp_path / "m.json") == 0
    assert "mutants are caught" in capsys.readouterr().out
    assert json.loads((tmp_path / "m.json").read_text())


def test_a_case_by_its_name_is_the_same_as_in_all_tables(monkeypatch):
    """Most are found without the cases of other operators. The name of a model of several nodes may begin with an operator."""
    everything = {case.name: case for case in conformance.select(conformance.tables())}
    named = {case.operator: name for name, case in everything.items() if case.values == "smooth"}
    of_models = [name for name, case in everything.items() if case.operator == "model" and name.startswith("Cast-")]
    asked: list[object] = []
    tables = sources.tables
    monkeypatch.setattr(sources, "tables", lambda operators=None: asked.append(operators) or tables(operators))
    for name in (*(named[operator] for operator in ("Softmax", "com.microsoft.Gelu", "Gelu", "If")), *of_models[:1]):
        found, expected = one_case(name, None, None, 0, "newest", None, None), everything[name]
        assert (found.name, found.model, found.operator) == (name, expected.model, expected.operator)
    assert asked == [["Softmax"], ["com.microsoft.Gelu"], ["Gelu"], ["If"], ["Cast"], None]


def test_the_suite_has_its_public_names_and_no_others():
    for name in conformance.__all__:
        assert getattr(conformance, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = conformance.nothing


def test_the_suite_runs_from_python():
    cases = list(conformance.select(conformance.tables(), ["Relu"], dtype="float32"))[:2]
    results = conformance.run_suite(cases, conformance.Plan(("refgrad",)), lanes=1)
    assert isinstance(results, conformance.Results)
    assert [(row.case, row.verdict) for row in results.rows] == [(case.name, "right") for case in cases]


def _scaled(path, factor):
    text = f"m (float[2] x) => (float[2] y) <float f = {{{factor}}}> {{ y = Mul(x, f) }}"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}'), path)
    return str(path)


def test_a_run_is_not_resumed_with_another_model(tmp_path, capsys):
    model = _scaled(tmp_path / "m.onnx", 2.0)
    asked = ["conformance", "run", "--source", model, "--backend", "numpy", "--workers", "1"]
    asked += ["--journal", str(tmp_path / "j")]
    assert main(asked) == 0
    _scaled(model, 3.0)
    assert main([*asked, "--resume"]) == 2
    assert "contents was" in " ".join(capsys.readouterr().err.split())


def test_models_of_one_name_are_not_taken_for_one(tmp_path, capsys):
    listed = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        listed += ["--source", _scaled(tmp_path / name / "m.onnx", 2.0)]
    assert main(["conformance", "run", *listed, "--backend", "numpy"]) == 2
    assert "Several models are called 'm.onnx'" in " ".join(capsys.readouterr().err.split())


def test_a_page_shows_no_file_that_results_name_alone(tmp_path):
    """Who writes results may name any file; only one that is as it was in the run is read again."""
    named = Path(_scaled(tmp_path / "m.onnx", 2.0))
    read, one_model = [], sources.one_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "one_model", lambda *given: read.append(given) or one_model(*given))
        for digest, times in (("0" * 64, 0), (fingerprint(named), 1)):
            results = Results({"sources": [str(named)], "seed": 0, "contents": {str(named): digest}}, {}, {})
            results.save(tmp_path / "r.json")
            assert main(["conformance", "report", str(tmp_path / "r.json"), "-o", str(tmp_path / "r.html")]) == 0
            assert len(read) == times


@pytest.mark.parametrize("settings", [{"sources": 5, "seed": 0}, {"sources": ["tables"]}, {"sources": [5], "seed": 0}])
def test_settings_that_are_malformed_are_said(tmp_path, capsys, settings):
    Results(settings, {}, {}).save(tmp_path / "r.json")
    assert main(["conformance", "report", str(tmp_path / "r.json"), "-o", str(tmp_path / "r.html")]) == 2
    assert "unexpected" not in capsys.readouterr().err

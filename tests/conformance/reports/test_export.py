"""The exported suite: what is in the folder, that it is right, the same every time, and whole or not there at all."""

import filecmp
import hashlib
import json
import unittest
import zipfile
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx.backend.test import loader
from onnx.backend.test.runner import Runner

from refgrad.backends import get_backend
from refgrad.backends.onnx_backend import OnnxBackend
from refgrad.conformance.case import Case, node_case
from refgrad.conformance.judge import judge
from refgrad.conformance.judge.running.sources import tables
from refgrad.conformance.oracles import Elementwise, Property
from refgrad.conformance.oracles.central import directional
from refgrad.conformance.problems.feeds import widened
from refgrad.conformance.tools.exporting import expected as expecting
from refgrad.conformance.tools.exporting.expected import ORACLES, curated, expect, symbolic
from refgrad.conformance.tools.exporting.export import export, export_suite
from refgrad.conformance.tools.exporting.models import models_in
from refgrad.conformance.tools.exporting.names import named_tests
from refgrad.conformance.tools.exporting.sizes import symbols, with_sizes
from refgrad.errors import OptionError, OutputFileError, RefgradError, UnconfirmedError, UnknownNameError
from refgrad.tables.registry import BODY, RULES
from refgrad.tables.schemas import find_schema

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]

OPERATORS = ("LogSoftmax", "Gemm", "Cast", "LeakyRelu", "Sign")
NUMBERS = np.array([[0.5, -1.5, 2.0], [1.25, -0.75, 0.3]], np.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_suite(tmp_path_factory.mktemp("export") / "suite", OPERATORS)


def tensor(path):
    return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))


def folders(made, kind="gradient"):
    """The folder of each test, by its name."""
    return {name: made.folder / entry[kind] for name, entry in made.tests.items()}


def outcome(folder):
    """What onnx's own loader and runner make of the gradients in a folder, on the interpreter."""
    runner = Runner.__new__(Runner)  # the constructor would load the tests of onnx
    runner.backend, runner._parent_module, runner._test_kwargs = OnnxBackend, None, {}
    runner._include_patterns, runner._exclude_patterns, runner._xfail_patterns = set(), set(), set()
    runner._test_items = defaultdict(dict)
    for test in loader.load_model_tests(data_dir=str(folder), kind="gradients"):
        runner._add_model_test(test, "Gradient")
    return runner.test_suite.run(unittest.TestResult())


@pytest.mark.parametrize(("section", "least"), [("", 60), ("symbolic", 20)])
def test_onnx_loads_and_passes_the_gradients(exported, section, least):
    result = outcome(exported.folder / section)
    tests = [entry for entry in exported.tests.values() if entry["section"] == section]
    assert result.testsRun == 2 * len(tests) > least
    assert len(result.skipped) == len(tests), "the tests for CUDA"
    assert result.wasSuccessful(), (result.errors + result.failures)[:3]


def test_every_size_is_a_number(exported):
    for name, entry in exported.tests.items():
        for kind in ("gradient", "forward"):
            model = onnx.load(exported.folder / entry[kind] / "model.onnx")
            found = list(symbols(model))
            assert bool(found) == (entry["section"] == "symbolic"), f"{name}: {found}"
            if not found and kind == "gradient":  # those of intermediate values too
                sizes = {value.name for value in (*model.graph.output, *model.graph.value_info)}
                assert {output for node in model.graph.node for output in node.output if output} <= sizes


def test_the_sizes_are_those_that_there_are(exported):
    for name, folder in folders(exported).items():
        model = onnx.load(folder / "model.onnx")
        feeds = {v.name: tensor(folder / f"test_data_set_0/input_{k}.pb") for k, v in enumerate(model.graph.input)}
        if exported.tests[name]["section"] == "":
            for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
                found = feeds.get(value.name)
                if found is not None:
                    assert tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) == found.shape
            assert with_sizes(model, feeds) == model


@pytest.mark.parametrize("factor", [2.001, 1.001, -1.0, 0.0])
def test_a_wrong_value_fails(tmp_path, factor):
    made = export(tmp_path / "suite", {"test_grad_x": node_case("Exp", NUMBERS)})
    output = made.folder / "gradients" / "test_grad_x" / "test_data_set_0" / "output_0.pb"
    wrong = numpy_helper.from_array((tensor(output) * np.float32(factor)).astype(np.float32))
    output.write_bytes(wrong.SerializeToString())
    assert not outcome(made.folder).wasSuccessful()


def test_the_models_are_valid_and_plain(exported):
    for path in exported.folder.rglob("model.onnx"):
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        assert {entry.domain for entry in model.opset_import} == {""}
        assert not {v.name for v in model.graph.input} & {t.name for t in model.graph.initializer}


def test_forward_tests_agree_with_differences_of_their_models(exported):
    for folder in folders(exported, "forward").values():
        path = folder / "case.json"
        case = json.loads(path.read_text(encoding="utf-8"))
        feeds, cotangents, gradients = (
            {name: tensor(path.with_name(file)) for name, file in case[kind].items()}
            for kind in ("feeds", "cotangents", "gradients")
        )
        model = onnx.load(path.with_name("model.onnx"))
        forward = get_backend("numpy").prepare(model, precision="float64")
        rng = np.random.default_rng(0)
        for name, gradient in gradients.items():
            assert gradient.shape == feeds[name].shape
            assert gradient.dtype == feeds[name].dtype
            direction = rng.standard_normal(gradient.shape)
            found = directional(forward.run, widened(feeds), {name: direction}, widened(cotangents))
            allowed = case["tolerance"] * np.abs(direction).sum() + 10 * found.error + 1e-6 * abs(found.value)
            assert abs(np.sum(gradient.astype(np.float64) * direction) - found.value) <= allowed, case["name"]


def test_both_forms_hold_the_same_numbers(exported):
    for name in exported.tests:
        gradient, forward = (folders(exported, kind)[name] for kind in ("gradient", "forward"))
        model, data = onnx.load(gradient / "model.onnx"), gradient / "test_data_set_0"
        case = json.loads((forward / "case.json").read_text(encoding="utf-8"))
        outputs = [tensor(data / f"output_{k}.pb") for k in range(len(model.graph.output))]
        found = [tensor(forward / file) for file in case["gradients"].values()]
        for one, other in zip(outputs, found, strict=True):
            np.testing.assert_array_equal(one, other)
        assert len(list(data.iterdir())) == 2 * (len(model.graph.input) + len(outputs))


def test_the_outputs_of_a_forward_test_are_those_of_its_model(exported):
    for folder in folders(exported, "forward").values():
        case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        feeds = {name: tensor(folder / file) for name, file in case["feeds"].items()}
        results = get_backend("numpy").prepare(onnx.load(folder / "model.onnx")).run(feeds)
        for name, file in case["outputs"].items():
            right = tensor(folder / file)
            assert right.dtype == results[name].dtype
            np.testing.assert_allclose(
                results[name].astype(np.float64), right.astype(np.float64), rtol=0, atol=case["outputs_tolerance"]
            )


def test_an_array_is_the_same_in_both_formats(exported):
    for path in exported.folder.rglob("*.npy"):
        array, right = np.load(path, allow_pickle=False), tensor(path.with_suffix(".pb"))
        assert array.shape == right.shape
        assert array.tobytes() == right.tobytes()
        assert array.dtype == right.dtype or array.dtype.kind == "u"


def test_the_lists_have_every_test(exported):
    for kind in ("gradients", "forward"):
        for section in ("", "symbolic"):
            lines = (exported.folder / section / kind / "tests.tsv").read_text(encoding="utf-8").splitlines()
            rows = [line.split("\t") for line in lines]
            assert [row[1] for row in rows if row[0] == "test"] == [
                name for name, entry in exported.tests.items() if entry["section"] == section
            ]
            for row in rows:
                assert (exported.folder / section / kind / row[2 if row[0] == "test" else 3]).is_file()


def test_the_manifest_says_what_a_model_needs(exported):
    for name, folder in folders(exported).items():
        entry, model = exported.tests[name], onnx.load(folder / "model.onnx")
        assert {node.op_type for node in model.graph.node} <= set(entry["operators"])
        assert entry["dtype"] in entry["dtypes"]
        assert entry["tolerance_reason"]


def test_the_manifest_follows_its_schema_and_has_every_file(exported):
    folder = exported.folder
    schemas = {
        kind: json.loads((folder / "schema" / f"{kind}.schema.json").read_text(encoding="utf-8"))
        for kind in ("manifest", "case")
    }
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest == exported.document
    jsonschema.validate(manifest, schemas["manifest"])
    for path in folder.rglob("case.json"):
        jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), schemas["case"])
    listed = manifest["files"].copy()
    for test in manifest["tests"]:
        listed |= test["files"]
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert listed.keys() == files.keys() - {"manifest.json"}
    for name, sum_ in listed.items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == sum_
    assert f"{len(manifest['tests'])} tests" in files["README.md"].read_text(encoding="utf-8")


def test_every_gradient_has_two_oracles_and_every_case_its_place(exported):
    assert {e["operator"] for e in exported.tests.values()} == set(OPERATORS)
    for entry in exported.tests.values():
        assert entry["confirmed"]
        assert all(len(set(oracles)) >= 2 for oracles in entry["confirmed"].values())
    places = [*exported.tests, *exported.left_out]
    every = [*curated().items(), *symbolic().items()]
    assert sorted(places) == sorted(name for name, case in every if case.operator in OPERATORS)


def test_the_same_cases_give_the_same_bytes(exported, tmp_path):
    again = export_suite(tmp_path / "again", OPERATORS)
    names = [path.relative_to(again.folder) for path in again.folder.rglob("*") if path.is_file()]
    assert filecmp.cmpfiles(exported.folder, again.folder, names, shallow=False)[1:] == ([], [])
    assert len(names) == sum(path.is_file() for path in exported.folder.rglob("*"))


def test_an_archive_has_the_same_bytes_every_time(exported, tmp_path):
    one, two = (export_suite(tmp_path / name, OPERATORS, archive=True).folder for name in ("a.zip", "b.zip"))
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        assert archive.testzip() is None
        files = {p.relative_to(exported.folder).as_posix(): p for p in exported.folder.rglob("*") if p.is_file()}
        assert archive.namelist() == sorted(files)
        assert all(archive.read(name) == path.read_bytes() for name, path in files.items())
    with pytest.raises(OutputFileError, match="exists"):
        export_suite(one, OPERATORS, archive=True)
    assert one.read_bytes() == two.read_bytes()


def test_whole_models_are_exported_too(tmp_path):
    (tmp_path / "models").mkdir()
    for name in ("fed", "drawn"):
        onnx.save(node_case("Exp", NUMBERS, shapes="symbolic").model, tmp_path / "models" / f"{name}.onnx")
    np.savez(tmp_path / "models" / "fed.npz", **{"feed/input": NUMBERS, "output/output": NUMBERS})
    made = export(tmp_path / "suite", {}, models=models_in(tmp_path / "models"))
    assert {entry["section"] for entry in made.tests.values()} == {"models"}
    fed = folders(made)["test_grad_model_fed"]
    np.testing.assert_array_equal(tensor(fed / "test_data_set_0" / "input_0.pb"), NUMBERS)
    assert not list(symbols(onnx.load(fed / "model.onnx")))
    assert len(made.tests) == 2
    assert outcome(made.folder / "models").wasSuccessful()


@pytest.mark.parametrize(("there", "told"), [(False, "There is nothing at"), (True, "no .onnx file in")])
def test_a_folder_without_models(tmp_path, there, told):
    if there:
        (tmp_path / "models").mkdir()
    with pytest.raises(OptionError, match=told):
        models_in(tmp_path / "models")


def test_nothing_but_the_suite_is_named(tmp_path):
    made = export(tmp_path / "suite", {"test_grad_x": node_case("Exp", NUMBERS)})  # which no runtime is known to fail
    text = (made.folder / "manifest.json").read_text(encoding="utf-8")
    exported = made
    assert not any(word in text for word in (onnx.__version__, np.__version__, str(exported.folder)))


# What makes no test


@pytest.mark.parametrize(
    ("case", "oracles", "told"),
    [
        (node_case("Exp", NUMBERS), ("differences",), "input: differences confirms it"),
        (node_case("Exp", NUMBERS), ("adjoint",), "input: adjoint confirms it"),
        (node_case("Relu", np.zeros(3, np.float32)), ORACLES, "X: "),
        (node_case("Dropout", NUMBERS, np.float32(0.5), np.array(True)), ORACLES, "Dropout draws random numbers"),
        (node_case("Sqrt", -np.abs(NUMBERS)), ORACLES, "the outputs 'Y' are not finite"),
        (
            node_case("Where", NUMBERS > 0, NUMBERS.astype(np.int32), NUMBERS.astype(np.int32)),
            ORACLES,
            "no float input",
        ),
    ],
)
def test_what_is_not_confirmed_makes_no_test(case, oracles, told):
    with pytest.raises(RefgradError, match=told):
        expect(case, oracles)


def test_what_makes_no_test_is_listed_with_the_reason(tmp_path):
    cases = {"test_grad_one": node_case("Exp", NUMBERS), "test_grad_zero": node_case("Sqrt", -np.abs(NUMBERS))}
    made = export(tmp_path / "suite", cases)
    assert list(made.tests) == ["test_grad_one"]
    assert "not finite" in made.left_out["test_grad_zero"]
    assert not (made.folder / "gradients" / "test_grad_zero").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a\tb", "tab or the end of a line"),
        ("a\nb", "tab or the end of a line"),
        ("a\rb", "tab or the end of a line"),
        ("a\x1bb", "control character"),
        ("a\u202eb", "control character"),
    ],
)
def test_a_name_that_would_break_the_lists_makes_no_test(tmp_path, name, what):
    node = onnx.helper.make_node("Exp", [name], ["y"])
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, (2, 3)) for n in (name, "y")]
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    models = models_in(tmp_path / "model.onnx")
    made = export(tmp_path / "suite", {"test_grad_exp": node_case("Exp", NUMBERS)}, models=models)
    assert made.left_out == {"test_grad_model_model": f"tests.tsv cannot hold the {what} in the name {name!r}."}
    assert list(made.tests) == ["test_grad_exp"]


def test_an_attribute_that_is_not_finite_is_a_text(tmp_path):
    case = node_case("Selu", NUMBERS, alpha=float("inf"), gamma=float("nan"))
    made = export(tmp_path / "suite", {"test_grad_selu": case})
    [entry] = json.loads((made.folder / "manifest.json").read_text())["left_out"]
    assert entry["attributes"] == {"alpha": "inf", "gamma": "nan"}


def test_a_tolerance_that_hides_the_gradient_makes_no_test(monkeypatch):
    monkeypatch.setattr(expecting, "rounding", lambda *_: 0.2)
    with pytest.raises(UnconfirmedError, match=r"input: an error of .* is explained, where .* is the gradient"):
        expect(node_case("Exp", NUMBERS))


def test_a_gradient_that_an_oracle_contradicts_is_no_test(monkeypatch):
    case, observe = node_case("Exp", NUMBERS), expecting.observe

    def planted(oracle, problem):
        wrong = 2.001 * np.exp(problem.at["input"]) * problem.cotangents["output"]
        return [Elementwise("planted", "input", wrong, 1e-9)] if oracle == "complex-step" else observe(oracle, problem)

    monkeypatch.setattr(expecting, "observe", planted)
    with pytest.raises(UnconfirmedError, match=r"planted says wrong: element .* planted has"):
        expect(case)


def test_a_property_that_does_not_hold_makes_no_test(monkeypatch):
    monkeypatch.setattr(expecting, "examine", lambda *_: [Property("adjoint", 1.0, 1e-6, "<v, Ju> is not <Jᵀv, u>")])
    with pytest.raises(UnconfirmedError, match="adjoint contradicts it: <v, Ju>"):
        expect(node_case("Exp", NUMBERS))


def test_an_oracle_that_fails_has_said_nothing(monkeypatch):
    observe = expecting.observe

    def broken(oracle, problem):
        if oracle == "complex-step":
            raise ZeroDivisionError("planted")
        return observe(oracle, problem)

    monkeypatch.setattr(expecting, "observe", broken)
    assert {"differences", "reference"} <= set(expect(node_case("Exp", NUMBERS)).confirmed["input"])
    with pytest.raises(UnconfirmedError, match="complex-step does not apply: ZeroDivisionError: planted"):
        expect(node_case("Exp", NUMBERS), ("differences", "complex-step"))


@pytest.mark.parametrize("factor", [2.001, -1.0])
def test_a_wrong_gradient_of_refgrad_is_no_expected_value(monkeypatch, factor):
    right = judge._in_float64

    def wrong(*arguments):
        made, gradients = right(*arguments)
        return made, {name: factor * gradient for name, gradient in gradients.items()}

    monkeypatch.setattr(judge, "_in_float64", wrong)
    with pytest.raises(UnconfirmedError, match=r"input: .*differences says"):
        expect(node_case("Exp", NUMBERS))


# Files


def test_an_existing_folder_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(OutputFileError, match=r"exists. Give the name of a folder that does not"):
        export(tmp_path, [node_case("Exp", NUMBERS)])
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_an_export_that_is_stopped_leaves_nothing(tmp_path):
    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "deep" / "suite", [node_case("Exp", NUMBERS)], progress=stop)
    assert not [path for path in tmp_path.rglob("*") if path.name != "deep"]


def test_progress_has_every_case(tmp_path):
    seen = []
    cases = {f"test_grad_{k}": node_case("Exp", NUMBERS + k) for k in range(3)}
    export(tmp_path / "suite", cases, progress=lambda *step: seen.append(step))
    assert [step[:2] for step in seen] == [(1, 3), (2, 3), (3, 3)]
    assert {name for *_, name in seen} == set(cases)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputFileError, match="cannot be written"):
        export(tmp_path / "file" / "suite", [node_case("Exp", NUMBERS)])


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda to: export_suite(to, ["Conf"]), UnknownNameError, r"'Conf'. Did you mean 'Conv'[?] There are 'Abs'"),
        (lambda to: export_suite(to, ["Conv"], "99"), OptionError, r"opset='99' is not an opset"),
        (lambda to: export_suite(to, ["Conv"], dtype="int8"), OptionError, r"no float type 'int8'"),
        (lambda to: export(to, []), OptionError, r"There is no case to export"),
        (lambda to: export(to, [node_case("Exp", NUMBERS)], oracles=["no"]), OptionError, r"There is no oracle 'no'"),
    ],
)
def test_errors_say_what_is_valid(tmp_path, call, error, told):
    with pytest.raises(error, match=told):
        call(tmp_path / "suite")
    assert not list(tmp_path.iterdir())


def test_opset_and_type_can_be_chosen(tmp_path):
    made = export_suite(tmp_path / "suite", ["LeakyRelu"], "17", "float64")
    assert {(entry["opset"], entry["dtype"]) for entry in made.tests.values()} == {(17, "float64")}
    assert outcome(made.folder).wasSuccessful()


def test_an_initializer_that_is_differentiated_is_fed(tmp_path):
    case = node_case("Mul", NUMBERS, NUMBERS + 3, constant=("B",), wrt=("A", "B"))
    made = export(tmp_path / "suite", {"test_grad_x": case})
    model = onnx.load(made.folder / "gradients" / "test_grad_x" / "model.onnx")
    assert [value.name for value in model.graph.input] == ["A", "B", "C_grad"]
    assert outcome(made.folder).wasSuccessful()


# Which cases, and what they are called


def plain(case):
    return case.static and case.values == "smooth" and all(node.domain == "" for node in case.model.graph.node)


def features(case):
    yield case.operator, case.dtype
    for node in case.model.graph.node:
        yield case.operator, find_schema(node.op_type, "", case.opset).since_version
        for attribute in node.attribute:
            yield case.operator, attribute.name, attribute.i, attribute.s


def test_the_selection_has_every_operator_and_every_attribute():
    cases = [case for case in tables() if plain(case)]
    every, chosen = ({one for case in some for one in features(case)} for some in (cases, curated().values()))
    assert chosen == every
    assert len(curated()) < 0.7 * len(cases)
    derivable = {name for domain, name in (*RULES, *BODY) if not domain} & {case.operator for case in cases}
    assert derivable <= {case.operator for case in curated().values()}
    assert len(derivable) > 130


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (node_case("Exp", NUMBERS), "test_grad_exp_opset22_2x3"),
        (node_case("Exp", NUMBERS.astype(np.float64)), "test_grad_exp_opset22_float64_2x3"),
        (node_case("LeakyRelu", NUMBERS, alpha=-0.5), "test_grad_leakyrelu_opset22_alphaminus0_5_2x3"),
        (node_case("LeakyRelu", NUMBERS, alpha=0.01), "test_grad_leakyrelu_opset22_2x3"),  # the default
        (node_case("Gelu", NUMBERS, approximate="tanh"), "test_grad_gelu_opset22_tanh_2x3"),
        (node_case("Transpose", NUMBERS, perm=[1, 0]), "test_grad_transpose_opset22_perm1x0_2x3"),
        (node_case("Cast", NUMBERS, to=11), "test_grad_cast_opset22_to_float64_2x3"),
        (node_case("Add", NUMBERS, NUMBERS[0]), "test_grad_add_opset22_broadcast_2x3_3"),
        (node_case("Exp", NUMBERS[0, 0]), "test_grad_exp_opset22_scalar"),
        (node_case("Exp", NUMBERS[:0]), "test_grad_exp_opset22_empty_batch_0x3"),
        (node_case("Exp", NUMBERS[:, :0]), "test_grad_exp_opset22_empty_2x0"),
        (node_case("Exp", NUMBERS, shapes="symbolic"), "test_grad_exp_opset22_symbolic_2x3"),
        (
            node_case("Gemm", NUMBERS, NUMBERS.T, NUMBERS[0, 0], constant=["B"]),
            "test_grad_gemm_opset22_constant_b_with_c_2x3_scalar",
        ),
        (node_case("Exp", NUMBERS, name="Exp-of-a-matrix-static-opset22"), "test_grad_exp_opset22_of_a_matrix"),
        (
            Case("Two nodes", onnx.ModelProto(graph=onnx.GraphProto(node=[onnx.NodeProto()] * 2)), {}),
            "test_grad_two_nodes_opset1",
        ),
    ],
)
def test_names_say_what_a_case_has(case, name):
    assert list(named_tests([case])) == [name]


def test_names_are_told_apart():
    one, two, old = node_case("Exp", NUMBERS), node_case("Exp", NUMBERS[0]), node_case("Exp", NUMBERS, opset=13)
    names = list(named_tests([one, two, old, replace(one, name="Exp-2x3-1")]))
    assert names[:3] == ["test_grad_exp_opset22_2x3", "test_grad_exp_opset22_3", "test_grad_exp_opset13_2x3"]
    assert names[3] == "test_grad_exp_opset22_2d"
    titled = [replace(case, name="Exp-of-numbers-static") for case in (one, two)]
    assert list(named_tests(titled)) == ["test_grad_exp_opset22_of_numbers", "test_grad_exp_opset22_of_numbers_1d"]
    assert all(len(name) <= 100 and name.replace("_", "").isalnum() for name in curated())


def test_every_name_tells_the_opset():
    for name, case in (curated() | symbolic()).items():
        assert f"_opset{case.opset}" in name


@pytest.mark.parametrize("table", [curated, symbolic], ids=["curated", "symbolic"])
def test_an_operator_alone_has_the_same_tests(table: Any) -> None:
    whole: dict[str, dict[str, str]] = defaultdict(dict)
    for name, case in table().items():
        whole[case.operator][name] = case.name
    for operator, named in whole.items():
        alone = {name: case.name for name, case in table(frozenset([operator])).items()}
        assert list(alone.items()) == list(named.items()), operator

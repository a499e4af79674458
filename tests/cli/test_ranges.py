"""Options that mean nothing: NaN, infinite, zero, negative and huge numbers are refused by name, before any work."""

import math
from collections.abc import Iterator

import numpy as np
import onnx
import onnx.parser
import pytest
import typer

import refgrad
from refgrad import cli, recipes
from refgrad.cli import app
from refgrad.cli.numbers import is_numeric, number, require_ranges
from refgrad.cli.output import App
from refgrad.errors import OptionError
from refgrad.ranges import RANGES, Range, checked
from refgrad.training import (
    SGD,
    Adam,
    Adaptive,
    Arrays,
    Cosine,
    InverseScaling,
    Run,
    Training,
    Warmup,
    batches,
    lora,
    step_model,
)

pytestmark = pytest.mark.interpreter

LINE = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 18]> line (float[N, 2] x) => (float[N, 1] y) '
    "<float[2, 1] a = {0.5, 1}> { y = MatMul(x, a) }"
)
DATA = {"x": np.ones((5, 2), np.float32), "label": np.ones((5, 1), np.float32)}
TYPED = ("nan", "inf", "-inf", "0", "-1", "1" + "0" * 20, "1e400", "", "x", "9" * 5000)
# Options whose text holds a number, with that number in it. The others are found by their types.
TEXTS = {
    ("train", "--validation"): ("{}",),
    ("train", "--penalty"): ("a={},1", "a=1,{}"),
    ("train", "--weight-decay"): ("{}", "a={}"),
    ("run", "--dim"): ("{}", "N={}"),
    ("run", "--max-memory"): ("{}", "{}G"),
    ("show --cost", "--dim"): ("N={}",),
    ("grad", "--memory"): ("{}", "{} MB", "1 MB for N={}"),
    ("walk", "--seed"): ("{}", "1:{}"),
    ("conformance cases", "--opset"): ("{}", "13-{}"),
}
MEANT = {  # what a text may have after all
    "--penalty": {"0"},
    "--weight-decay": {"0"},
    "--dim": {"0", ""},
    "--seed": {"0"},
    "--memory": {"0"},
}


def numbers() -> Iterator[tuple[str, str, str]]:
    """Every numeric parameter of every command: the command, the option, and the row of its range."""
    yield from _numbers(app, typer.main.get_command(app), "")


def _numbers(group, built, prefix: str) -> Iterator[tuple[str, str, str]]:
    for one in group.registered_commands:
        name = one.name or one.callback.__name__
        options = {parameter.name: parameter.opts[0] for parameter in built.commands[name].params}
        for key, parameter in typer.main.get_params_from_function(one.callback).items():
            if is_numeric(parameter.annotation):
                yield f"{prefix}{name}", options[key], key
    for one in group.registered_groups:
        yield from _numbers(one.typer_instance, built.commands[one.name], f"{prefix}{one.name} ")


NUMBERS = sorted(set(numbers()))
NEEDED = {
    "train": ("m.onnx", "-o", "out.onnx", "--data", "d.npz"),
    "training-model": ("m.onnx", "-o", "out.onnx"),
    "compare": ("m.onnx", "--a", "refgrad@numpy", "--b", "refgrad@numpy"),
    "reduce": ("m.onnx", "--side", "refgrad@numpy", "-o", "out"),
    "record": ("os:getcwd", "-o", "out.npz"),
    "conformance run": ("--ops", "Neg"),
    "conformance cases": ("--ops", "Neg"),
    "conformance mutants": ("--ops", "Neg"),
    "conformance report": ("r.json", "-o", "out.json"),
    "conformance export": ("out",),
    "recipe sensitivity": ("m.onnx", "-o", "out.onnx"),
}
WRITES = ("grad", "jvp", "hvp", "jacobian", "hessian", "lower", "expand", "cut", *(f"recipe {name}" for name in (
    "saliency", "integrated-gradients", "fgsm", "forces")))  # fmt: skip


def words(command: str) -> list[str]:
    usual = ("m.onnx", "-o", "out.onnx") if command in WRITES else ("m.onnx",)
    return [*command.split(), *NEEDED.get(command.removesuffix(" --cost"), usual)]


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Type a command in a folder with a model and data. Return its exit code and its error message."""
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))
    monkeypatch.chdir(tmp_path)
    onnx.save(LINE, "m.onnx")
    np.savez("d.npz", **DATA)

    def call(given: list[str]) -> tuple[int, str]:
        return cli.main(given), capsys.readouterr().err

    return call


def test_numeric_options_are_found() -> None:
    found = {(command, option) for command, option, _ in NUMBERS}
    assert found >= {
        ("train", "--clip-norm"),
        ("train", "--rank"),
        ("check", "--tolerance"),
        ("conformance run", "--seconds"),
        ("recipe fgsm", "--clip"),
        ("show", "--max-seconds"),
    }
    assert len(found) > 60


def test_a_number_without_a_range_fails_at_import() -> None:
    group = App()

    def command(count: int = 1) -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match="'count'"):
        group.command("x")(command)
    with pytest.raises(KeyError):
        number("no such row")
    require_ranges(test_a_number_without_a_range_fails_at_import)


@pytest.mark.parametrize(("command", "option", "name"), NUMBERS)
def test_every_number_of_every_command(command, option, name, typed, tmp_path) -> None:
    before = sorted(tmp_path.iterdir())
    row = RANGES[name]
    refused = 0
    for text in TYPED:
        try:
            value = (int if row.whole else float)(text)
        except (ValueError, OverflowError):
            value = None
        if value is not None and not row.why_not(value):
            continue  # it means something
        if name == "clip":
            code, said = typed([*words(command), option, text, "1"])
        else:
            code, said = typed([*words(command), f"{option}={text}" if option.startswith("--") else text])
        assert code == 2, (text, said)
        assert "unexpected" not in said, (text, said)
        assert option in said or name.upper() in said, (text, said)
        refused += 1
    assert refused >= 5
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("command", "option"), TEXTS, ids=" ".join)
def test_numbers_in_texts(command, option, typed, tmp_path) -> None:
    for form in TEXTS[command, option]:
        for text in TYPED:
            code, said = typed([*words(command), *(["--cost"] if "cost" in command else []), option, form.format(text)])
            if code == 0 and text in MEANT.get(option, ()):
                continue
            assert code == 2, (form, text, said)
            assert "unexpected" not in said, (form, text, said)
    assert {one.name for one in tmp_path.iterdir()} <= {"d.npz", "m.onnx", "out.onnx"}


NOT_ABOVE_0 = (math.nan, math.inf, -math.inf, 0, -1, True, "1", None)
HUGE = (10**20, 10**400)


def arrays() -> Arrays:
    return Arrays(step_model(LINE), DATA)


LIBRARY = {
    "accumulate": (lambda v: step_model(LINE, accumulate=v), (*NOT_ABOVE_0, *HUGE, 1.5)),
    "seed": (lambda v: step_model(LINE, seed=v), (math.nan, -1, True, "1", None, *HUGE, 1.5)),
    "clip_norm": (lambda v: step_model(LINE, clip_norm=v), (*NOT_ABOVE_0[:-1], *HUGE)),
    "clip_value": (lambda v: step_model(LINE, clip_value=v), (*NOT_ABOVE_0[:-1], *HUGE)),
    "penalty": (lambda v: step_model(LINE, penalty={"a": (0.0, v)}), (math.nan, math.inf, -1, True, "1", None, *HUGE)),
    "weight_decay": (
        lambda v: step_model(LINE, weight_decay={"a": v}),
        (math.nan, math.inf, -1, True, "1", None, *HUGE),
    ),
    "rank": (lambda v: lora(LINE, "a", rank=v), (*NOT_ABOVE_0, *HUGE, 1.5)),
    "seed of lora": (lambda v: lora(LINE, "a", seed=v), (math.nan, -1, True, "1", *HUGE)),
    "epochs": (lambda v: Run(Training(step_model(LINE)), arrays(), epochs=v), (*NOT_ABOVE_0[:-1], *HUGE, 1.5)),
    "size": (lambda v: Run(Training(step_model(LINE)), arrays(), size=v), (*NOT_ABOVE_0[:-1], *HUGE, 1.5)),
    "seed of a run": (lambda v: Run(Training(step_model(LINE)), arrays(), seed=v), (math.nan, -1, True, "1", *HUGE)),
    "part": (lambda v: arrays().split(v, 0), (*NOT_ABOVE_0, 1, 1.5, *HUGE)),
    "batch": (lambda v: next(batches(DATA, v)), (*NOT_ABOVE_0, *HUGE)),
    "rate": (lambda v: Training(step_model(LINE), v), (*NOT_ABOVE_0, 10**400)),
    "period": (lambda v: Cosine(0.1, period=v), (*NOT_ABOVE_0, *HUGE)),
    "length": (lambda v: Warmup(0.1, length=v), (*NOT_ABOVE_0, *HUGE)),
    "factor": (lambda v: Adaptive(0.1, factor=v), (*NOT_ABOVE_0, *HUGE)),
    "momentum": (lambda v: SGD(momentum=v), (math.nan, math.inf, -1, 1.5, "1", None, *HUGE)),
    "power": (lambda v: InverseScaling(0.1, v), (math.nan, math.inf, "1", None, *HUGE)),
    "minimum": (lambda v: Cosine(0.1, minimum=v), (math.nan, math.inf, "1", None, True, 10**400)),
    "patience": (lambda v: Adaptive(0.1, patience=v), (math.nan, math.inf, "1", None, True, 10**400)),
    "eps of Adam": (lambda v: Adam(eps=v), (math.nan, math.inf, -1, "1", None, True, 10**400)),
    "l1_weight": (
        lambda v: step_model(LINE, "elastic", loss_settings={"l1_weight": v}),
        (math.nan, math.inf, "1", None, True, 10**400),
    ),
    "a size": (lambda v: refgrad.cost(LINE, {"N": v}), (math.nan, -1, "1", True, *HUGE)),
    "beta1": (lambda v: Adam(beta1=v), (math.nan, math.inf, -1, 1, 1.5, "1", None, *HUGE)),
    "steps": (lambda v: recipes.integrated_gradients(LINE, steps=v), (*NOT_ABOVE_0, *HUGE)),
    "eps": (lambda v: recipes.fgsm(LINE, eps=v), (math.nan, math.inf, "1", None, 10**400)),
    "tolerance": (lambda v: refgrad.conformance.check(LINE, tolerance=v), (*NOT_ABOVE_0[:-1], *HUGE)),
    "directions": (lambda v: refgrad.conformance.check(LINE, directions=v), (*NOT_ABOVE_0, *HUGE)),
    "max_memory": (lambda v: refgrad.gradient(LINE, max_memory=v), (*NOT_ABOVE_0[:-1], *HUGE)),
    "max_seconds": (lambda v: refgrad.gradient(LINE, max_seconds=v), (*NOT_ABOVE_0[:-1], *HUGE)),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_refuses_them_too(name: str) -> None:
    call, values = LIBRARY[name]
    for value in values:
        with pytest.raises(OptionError):
            call(value)


def test_what_a_range_holds() -> None:
    part = Range("a part", 0, 1, above=True, below=True)
    values = (0, 1e-9, 0.5, 1, np.float32(0.5), np.int64(1), True, math.nan)
    assert [value for value in values if not part.why_not(value)] == [1e-9, 0.5, 0.5]
    assert checked("epochs", np.int64(3)) == 3
    for name, value, shown, said in (
        ("epochs", 10**10, "", "epochs is an integer above 0 and at most 1000000000, not 10000000000."),
        ("momentum", 2, "", "momentum is a number from 0 to 1, not 2."),
        ("rate", math.nan, "--rate", "--rate must be a number above 0, not nan."),
    ):
        with pytest.raises(OptionError) as caught:
            checked(name, value, shown)
        assert str(caught.value) == said

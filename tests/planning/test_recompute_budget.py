"""A memory budget for a gradient: what is predicted to fit does fit, and nothing is repeated for nothing."""

from functools import cache

import onnx
import pytest
from measuring import feeds_of, layers, measured, parsed

import refgrad
from refgrad.backends import get_backend
from refgrad.cli import main
from refgrad.errors import OptionError
from refgrad.planning.cost import Cost
from refgrad.reverse.memory import budget

MIB = 2**20
MODEL = layers(6)


@cache
def cost(recompute: bool) -> Cost:
    return refgrad.cost(refgrad.gradient(MODEL, recompute=recompute))


def limit_of(share: float) -> int:
    """A budget between what is needed where all is repeated, share 0, and where nothing is."""
    return round(cost(True).peak * 1.3 + share * (cost(False).peak - cost(True).peak))


@pytest.mark.parametrize(
    ("text", "limit", "sizes"),
    [
        ("2 GiB", 2 * 2**30, {}),
        ("800MiB", 800 * MIB, {}),
        ("1.5GB", 1_500_000_000, {}),
        ("64 kB", 64_000, {}),
        ("20M", 20 * MIB, {}),
        ("4096", 4096, {}),
        ("4096 bytes", 4096, {}),
        ("1 GiB for N=32, T=128", 2**30, {"N": 32, "T": 128}),
    ],
)
def test_what_a_budget_says(text, limit, sizes):
    found = budget(text)
    assert (found.limit, dict(found.sizes)) == (limit, sizes)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("text", ["", "much", "-1 GiB", "2 PiB", "2 GiB for", "2 GiB for N", "2 GiB for N=x", "/0/*"])
def test_what_is_no_budget(text):
    with pytest.raises(OptionError, match="is no memory budget"):
        refgrad.gradient(MODEL, memory=text)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
def test_a_run_keeps_the_budget(share):
    limit = limit_of(share)
    made = refgrad.gradient(MODEL, memory=str(limit))
    assert measured(made, feeds_of(made)) <= limit
    assert cost(False).flops < refgrad.cost(made).flops <= cost(True).flops


def test_a_larger_budget_takes_fewer_operations():
    limits = [limit_of(share) for share in (0.2, 0.5, 0.8)]
    counts = [refgrad.cost(refgrad.gradient(MODEL, memory=str(limit))).flops for limit in limits]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_nothing_is_repeated_for_nothing():
    assert refgrad.gradient(MODEL, memory="1 GiB") == refgrad.gradient(MODEL)


def test_the_values_are_the_same():
    limit = limit_of(0.3)
    stored, again = (refgrad.gradient(MODEL, memory=choice) for choice in (None, str(limit)))
    results = [get_backend("numpy").prepare(model).run(feeds_of(model)) for model in (stored, again)]
    for name, value in results[0].items():
        assert (value == results[1][name]).all(), name


def test_a_budget_that_is_too_small():
    with pytest.raises(OptionError, match=r"memory='1.* KiB' is too little. The peak is .* MiB with recomputation"):
        refgrad.gradient(layers(4), memory="1 KiB")


def test_the_least_that_is_named_does_fit():
    model = layers(4)
    with pytest.raises(OptionError) as raised:
        refgrad.gradient(model, memory="1 KiB")
    named = str(raised.value).partition("Allow ")[2].partition(",")[0]
    assert refgrad.gradient(model, memory=named)


UNSIZED = parsed("g (float[N,64] x, float[64,64] w) => (float[N,64] y) { a = MatMul(x, w) b = Tanh(a) y = Exp(b) }")


def test_sizes_that_the_model_does_not_know():
    with pytest.raises(
        OptionError, match=r"size 'N' of input 'x' is not known. Give it with the budget: memory='2 GiB for N=32'"
    ):
        refgrad.gradient(UNSIZED, memory="2 GiB")
    assert refgrad.gradient(UNSIZED, memory="2 GiB for N=32") == refgrad.gradient(UNSIZED)
    with pytest.raises(OptionError, match="is too little"):
        refgrad.gradient(UNSIZED, memory="1 MiB for N=100000")


def test_shapes_that_depend_on_values():
    model = parsed("g (float[64] x) => (float[K] y) { i = NonZero(x) t = Transpose(i) z = GatherND(x, t) y = Exp(z) }")
    with pytest.raises(OptionError, match="no memory can be predicted"):
        refgrad.gradient(model, memory="2 GiB for K=64")


@pytest.mark.parametrize("cotangent", ["input", "ones", "yield"])
def test_the_other_dialect(cotangent):
    limit = str(limit_of(0.3))
    made = refgrad.gradient(MODEL, dialect="ort", cotangent=cotangent, memory=limit)
    assert any(node.name.endswith("_again") or "_again" in node.name for node in made.graph.node)


def test_a_split():
    limit = str(round(cost(True).peak * 1.5))
    assert refgrad.split(MODEL, memory=limit).saved != refgrad.split(MODEL).saved


def test_the_old_spelling_warns():
    with pytest.warns(FutureWarning, match="recompute='1 GiB' is a memory budget: write memory= instead"):
        assert refgrad.gradient(MODEL, recompute="1 GiB") == refgrad.gradient(MODEL)


def test_options_that_do_not_fit():
    with pytest.raises(OptionError, match="give memory, or recompute"):
        refgrad.gradient(MODEL, recompute=True, memory="1 GiB")
    with pytest.raises(OptionError, match="is no memory budget: write a string"):
        refgrad.gradient(MODEL, memory=2**30)
    with pytest.raises(OptionError, match="neither a bool nor a list: write a list for names or patterns"):
        refgrad.gradient(MODEL, recompute="/layers.0/*")


def test_the_command(tmp_path, capsys):
    path, output = tmp_path / "model.onnx", tmp_path / "gradient.onnx"
    onnx.save(UNSIZED, path)
    words = ["grad", str(path), "-o", str(output)]
    assert main([*words, "--memory", "2 GiB for N=32"]) == 0
    assert onnx.load(output) == refgrad.gradient(path)
    for more, says in (
        (["--recompute-within", "2 GiB"], "for N=32"),
        (["--memory", "20M"], "for N=32"),
        (["--memory", "much"], "no memory budget"),
        (["--memory", "2 GiB", "--recompute"], "exclude each other"),
    ):
        capsys.readouterr()
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err

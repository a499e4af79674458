"""Everything that touches one operator, in seconds: `python tests/one_operator.py Softsign` (`nox -s quick -- Softsign`).

Its rule and its cases in both dialects, its node tests, what its strategy draws, its shorter types, its lowering, its kernel,
its second derivative, its row in docs/, and what it lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from refgrad.conformance.tools.coverage import family, gaps
from refgrad.errors import UnknownNameError
from refgrad.protos.domains import MICROSOFT

TESTS = Path(__file__).parent
EVERY = (
    *("registry", "node_models", "strategies", "types", "case_tables", "rules_properties", "lower"),
    *("second_derivatives", "numpy_kernels", "numpy_special", "numpy_types", "numpy_precision", "forwards"),
    "coverage",  # last, so that what is missing stands at the end
)


def selection(operators: Sequence[str]) -> list[str]:
    """What pytest is told: the files, and the names that the tests of the operators have.

    :raises UnknownNameError: there is no such operator.
    """
    names = list(EVERY)
    for operator in operators:
        gaps(operator)
        domain, _, op_type = operator.rpartition(".")
        if domain == MICROSOFT:
            names += ["rules_microsoft", f"microsoft_{family(domain, op_type)}"]
        else:
            names.append(f"rules_{family(domain, op_type)}")
    files = {file.stem.removeprefix("test_"): file for file in TESTS.rglob("test_*.py")}
    matching = " or ".join(operator.rpartition(".")[2] for operator in operators)
    return [*(str(files[name]) for name in dict.fromkeys(names) if name in files), "-k", matching]


def main(operators: Sequence[str]) -> int:
    """Run the tests; the exit code of pytest, 2 where there is no such operator."""
    if not operators:
        print("Name one operator or several: Softsign, com.microsoft.Gelu.", file=sys.stderr)
        return 2
    try:
        chosen = selection(operators)
    except UnknownNameError as error:
        print(error, file=sys.stderr)
        return 2
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # refgrad imported hypothesis before pytest could
    return int(pytest.main(["-q", *quiet, *chosen]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

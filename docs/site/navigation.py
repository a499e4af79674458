"""The order in which the site shows its pages, and what a newcomer reads for a title."""

from __future__ import annotations

from collections.abc import Collection, Iterable

# A section: its title, and its entries, each a page of the site with the title that the navigation shows ("": its own).
SECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Start",
        (
            ("overview", "What refgrad is"),
            ("start/debug", ""),
            ("start/test_a_runtime", ""),
            ("start/teach", ""),
            ("start/train", ""),
            ("troubleshooting", ""),
            ("comparisons", ""),
        ),
    ),
    (
        "Notebooks",
        tuple(
            (f"notebooks/{name}", "")
            for name in ("debug_a_gradient", "test_a_runtime", "teach_backprop", "train_and_explain")
        ),
    ),
    (
        "Guides",
        (
            ("given_model", "The gradient of a model you were given"),
            ("walking", "Walking through a backward pass"),
            ("export", "Testing your runtime"),
            ("locating", "Finding a mismatch"),
            ("nan_in_a_gradient", ""),
            ("training", "Training"),
            ("fine_tuning", ""),
            ("train_command", ""),
            ("many_processes", ""),
            ("estimators", ""),
            ("torch", "A layer of torch"),
            ("jax", "A function of JAX"),
            ("recipes", "Explaining and attacking models"),
            ("higher_order", ""),
            ("control_flow", ""),
            ("weights", ""),
            ("deployed", ""),
            ("add_an_operator", "Adding an operator"),
        ),
    ),
    ("Course", ()),  # docs/course
    (
        "Examples",
        tuple(
            (f"examples/{name}", "")
            for name in ("regression", "optimizers", "forward_backward", "derivative_options", "losses")
        ),
    ),
    (
        "Reference",
        (
            ("operators/index", "Operators"),
            ("kinks", ""),
            ("api", ""),
            ("reference/index", "Functions and classes"),
            ("cheat_sheet", ""),
            ("commands", ""),
            ("glossary", ""),
            ("executors", ""),
            ("check", ""),
            ("showing", ""),
            ("interpreter", ""),
            ("opsets", ""),
            ("security", ""),
        ),
    ),
    (
        "How right, how fast",
        (
            ("conformance", ""),
            ("scoreboard", ""),
            ("findings", ""),
            ("oracles", ""),
            ("precision", ""),
            ("mutants", ""),
            ("runtimes", ""),
            ("backend_tests", ""),
            ("node_models", ""),
            ("models", ""),
            ("gallery", ""),
            ("parity", ""),
            ("benchmarks", ""),
        ),
    ),
    (
        "Reports",
        tuple(
            (f"reports/{name}", "")
            for name in (
                "README",
                "scoreboard",
                "findings",
                "precision",
                "special_points",
                "mutants",
                "random_graphs",
                "runtimes",
                "parity",
                "models",
                "deployed",
                "gallery",
                "weights",
                "higher_order",
                "benchmarks",
            )
        ),
    ),
    ("Working on refgrad", (("architecture", ""), ("contributing", ""), ("development", ""), ("changelog", ""))),
)
COURSE = "Course"
REST = "Further pages"


def trees(pages: Collection[str], course: Iterable[str] = ()) -> str:
    """Return the navigation as directives of the start page.

    :param pages: the pages of the site that belong into it, without their endings; those of no section come last.
    :param course: the pages of the course, in their order.
    """
    left = set(pages)
    parts = []
    chapters = tuple((name, "") for name in course)
    for title, entries in SECTIONS:
        there = [(name, shown) for name, shown in (chapters if title == COURSE else entries) if name in left]
        left -= {name for name, _ in there}
        parts.append(_tree(title, there))
    parts.append(_tree(REST, [(name, "") for name in sorted(left)]))
    return "\n".join(filter(None, parts))


def _tree(title: str, entries: Iterable[tuple[str, str]]) -> str:
    lines = [f"{shown} <{name}>" if shown else name for name, shown in entries]
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *lines, "```", ""]) if lines else ""

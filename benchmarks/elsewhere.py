"""An executor that runs models in a runtime that has an environment of its own."""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import elsewhere_program as program
from onnx import ModelProto, version_converter

from refgrad.backends import Backend, Prepared
from refgrad.backends.base import ModelLike, check_outputs, graph_inputs, graph_outputs, load_model
from refgrad.errors import BackendError

SECONDS = 600.0  # for an answer of the runtime


class Elsewhere(Backend):
    """A runtime in an environment of its own; the process is started again where it died."""

    def __init__(self, runtime: str, python: Path, ir: int = 0, opset: int = 0) -> None:
        self._runtime, self._python, self._ir, self._opset = runtime, python, ir, opset
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._said = Path(self._folder.name) / "stderr.txt"
        self._count = 0
        self.name = runtime
        try:
            self.name = f"{runtime} {self.ask({})['version']}"
        except BackendError:
            self.close()
            raise

    def description(self) -> str:
        """The runtime with its version."""
        return self.name

    def close(self) -> None:
        """End the process, and delete its files."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()

    def path(self, suffix: str) -> str:
        """The path of a new file."""
        self._count += 1
        return f"{self._folder.name}/{self._count}{suffix}"

    def prepare(self, model: ModelLike, **options: Any) -> Prepared:
        """Let the runtime read the model.

        :raises BackendError: it does not, or an option is given.
        """
        if options:
            raise BackendError(f"{self.name} has no options")
        return _PreparedElsewhere(self, self.older(load_model(model)))

    def older(self, model: ModelProto) -> ModelProto:
        """The model with an IR version and an opset that the runtime reads.

        With an opset, Reshape loses allowzero=1, which torch's exporter writes and onnx2torch refuses: no tensor is empty.
        """
        made = ModelProto()
        made.CopyFrom(model)
        made.ir_version = min(made.ir_version, self._ir or made.ir_version)
        if self._opset:
            for node in made.graph.node:
                kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
                del node.attribute[:]
                node.attribute.extend(kept)
            try:
                return version_converter.convert_version(made, self._opset)
            except RuntimeError:  # onnx does not write some node in it: the runtime says what it makes of the number
                for opset in made.opset_import:
                    opset.version = opset.version if opset.domain else min(opset.version, self._opset)
        return made

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request; to an empty one, what the process says when it starts.

        :raises BackendError: an error, no answer in time, or the process died.
        """
        if self._process is None or self._process.poll() is not None:
            with self._said.open("w") as said:
                self._process = subprocess.Popen(
                    [str(self._python), program.__file__, self._runtime],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
                )  # fmt: skip
            started = self._answer()
            if not asked:
                return started
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], SECONDS)
        line = process.stdout.readline() if ready else ""
        if not line:
            if not ready:
                self._end()
                raise BackendError(f"nothing came back after {SECONDS:g} s")
            code = process.wait()
            last = self._said.read_text(errors="replace").strip().rpartition("\n")[2]
            raise BackendError(f"its process ended with {code}" + (f": {last}" if last else ""))
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BackendError(answer["error"].replace(f"{self._folder.name}/", ""))
        return answer


class _PreparedElsewhere(Prepared):
    def __init__(self, owner: Elsewhere, model: ModelProto) -> None:
        self.inputs, self.outputs = graph_inputs(model.graph), graph_outputs(model.graph)
        self._owner, self._path = owner, Path(owner.path(".onnx"))
        self._path.write_bytes(model.SerializeToString())
        self._names = {
            "inputs": [value.name for value in self.inputs if not value.has_default],
            "outputs": [value.name for value in self.outputs],
        }
        owner.ask({"model": str(self._path), **self._names})

    def __del__(self) -> None:
        self._path.unlink(missing_ok=True)

    def run(self, feeds: Mapping[str, Any], outputs: Iterable[str] | None = None) -> dict[str, Any]:
        given, made = self._owner.path(".npz"), self._owner.path(".npz")
        program.write(given, {name: feeds[name] for name in self._names["inputs"]})
        self._owner.ask({"model": str(self._path), "feeds": given, "results": made, **self._names})
        results = program.read(made)
        for file in (given, made):
            Path(file).unlink()
        return {name: results[name] for name in check_outputs(outputs, self.outputs)}

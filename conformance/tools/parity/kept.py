"""Equal gradients saved to a file, for runtimes without training operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto

from refgrad.conformance.tools.parity.pair import Pair
from refgrad.errors import FeedError
from refgrad.protos.arrays import read_arrays


@dataclass(frozen=True)
class Saved:
    """A case whose two gradients are equal: the gradients, their feeds, and their results."""

    case: str
    ours: ModelProto
    theirs: ModelProto
    feeds: Mapping[str, np.ndarray]
    results: Mapping[str, np.ndarray]


class Kept:
    """Cases whose two gradients are equal, saved for runtimes without training operators, which run both lowered."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._count = 0

    def add(self, case: str, pair: Pair, results: Mapping[str, np.ndarray]) -> None:
        """Add a case."""
        models = {"ours": pair.ours, "theirs": pair.theirs}
        parts = {name: np.frombuffer(model.SerializeToString(), np.uint8) for name, model in models.items()}
        parts["case"] = np.array(case)
        parts |= {f"feeds|{name}": value for name, value in pair.feeds.items()}
        parts |= {f"results|{name}": value for name, value in results.items()}
        self._arrays |= {f"{self._count}|{name}": value for name, value in parts.items()}
        self._count += 1

    def save(self, path: Path) -> None:
        """Write all cases to a file."""
        np.savez_compressed(path, allow_pickle=False, **self._arrays)

    @staticmethod
    def load(path: Path) -> Iterator[Saved]:
        """The cases in a file that `save` wrote.

        :raises FeedError: it is no such file, or it is damaged.
        """
        entries: dict[str, dict[str, np.ndarray]] = {}
        for key, array in read_arrays(path, "Equal gradients").items():
            number, _, name = key.partition("|")
            entries.setdefault(number, {})[name] = array
        for parts in entries.values():
            if not parts.keys() >= {"ours", "theirs", "case"}:
                raise FeedError(f"{str(path)!r} holds no equal gradients. Write it with `Kept.save`.")
            try:
                ours, theirs = (onnx.load_from_string(parts[whose].tobytes()) for whose in ("ours", "theirs"))
            except (DecodeError, ValueError) as error:
                raise FeedError(f"{str(path)!r} holds a gradient that is no model: {error}.") from error
            feeds, results = (
                {name.removeprefix(kind): array for name, array in parts.items() if name.startswith(kind)}
                for kind in ("feeds|", "results|")
            )
            yield Saved(str(parts["case"]), ours, theirs, feeds, results)

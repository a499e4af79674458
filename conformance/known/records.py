"""Records in TOML files: known bugs, known differences, equivalent mutants, limitations. A file is an array of tables.

    [[departure]]
    operators = "Pad"
    kind = "refused"
    reason = "It knows no mode but constant. refgrad knows all."

Whoever reads a file says which keys a record has and of which type each is. A record with another key, without a key that it
needs or with a value of another type is refused; the message names the file and the record.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from refgrad.errors import RecordsError, choices, did_you_mean
from refgrad.protos.inputs import read_text

_KINDS: Mapping[type | UnionType, str] = {
    str: "a string that is not empty",
    bool: "true or false",
    float: "a number with a decimal point",
    list: "a list",
    dict: "a table",
    dict | str: "a table, or a string",
}


@dataclass(frozen=True)
class Record:
    """One table: its values by key, and which one it is, in words."""

    values: Mapping[str, Any]
    where: str
    error: type[RecordsError] = RecordsError

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def wrong(self, what: str) -> RecordsError:
        """An error that says which record it is about, then `what`."""
        return self.error(f"{self.where}: {what}")


def read(
    path: str | os.PathLike[str],
    table: str,
    keys: Mapping[str, type | UnionType],
    optional: Collection[str] = (),
    named_by: Sequence[str] = (),
    error: type[RecordsError] = RecordsError,
) -> Iterator[Record]:
    """Read every record of a file, checked.

    :param table: the name of the tables, of which each is a record.
    :param keys: the keys that a record may have, and the type of each.
    :param optional: the keys that a record may leave out.
    :param named_by: the keys whose values tell a reader which record a message is about, besides its number.
    :param error: the class of the errors that are raised.
    :raises RecordsError: the file cannot be read, is no TOML, or has a record that is not as it has to be.
    """
    for number, values in enumerate(_tables(path, table, error), 1):
        name = ", ".join(str(values[key]) for key in named_by if key in values)
        where = f"{str(path)!r}, entry {number}" + (f" ({name})" if name else "")
        if unknown := sorted(values.keys() - keys.keys()):
            hint = did_you_mean(unknown[0], keys)
            raise error(f"{where} has the key {unknown[0]!r}.{hint} There are {choices(keys)}.")
        for key, kind in keys.items():
            if key not in values:
                if key not in optional:
                    raise error(f"{where} has no {key}. Give it {_KINDS[kind]}.")
            elif not isinstance(values[key], kind) or (isinstance(values[key], str) and not values[key].strip()):
                raise error(f"{where}: {key} is {values[key]!r}. It has to be {_KINDS[kind]}.")
        yield Record(values, where, error)


def files(package: str) -> list[Path]:
    """The TOML files beside a module, by name; `package` is its `__file__`."""
    return sorted(Path(package).parent.glob("*.toml"))


def _tables(path: str | os.PathLike[str], table: str, error: type[RecordsError]) -> list[dict[str, Any]]:
    text = read_text(path, error)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as failure:
        raise error(f"{str(path)!r} is no TOML: {failure}. Entries begin with [[{table}]].") from failure
    if unknown := sorted(document.keys() - {table}):
        raise error(f"{str(path)!r} has {choices(unknown)}. It may have [[{table}]] only.")
    found = document.get(table, [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise error(f"{str(path)!r}: write [[{table}]], with two brackets, above each entry.")
    return found

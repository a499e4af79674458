"""Files that are damaged, or contradict themselves: bits, archives, headers of arrays, JSON, TOML, values in protobuf."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

from onnx import SequenceProto, TensorProto

Damage = Callable[[bytes, random.Random], bytes]

_NUMBERS = (
    b"-1",
    b"0",
    b"4611686018427387904",
    b"1180591620717411303424",
    b"1e400",
    b"nan",
    b"inf",
    b"9" * 5000,
    b"0.5",
)
_SIZES = (
    *("(-1,)", "(True, 2)", "(2**70,)", f"({2**70},)", f"({2**62}, 2)", f"(0, {2**62}, 8)", "(3", "[3]", "(1.5,)"),
    *("('a',)", "()", f"({'1,' * 100})", f"({2**31},)", "(-3, -2)", "None", "(" * 300 + ")" * 300, "-" * 3000 + "1"),
)
_DESCRIPTIONS = (
    *("'|O'", "[('a', '<f4')]", "'<f16'", "'<U999999999'", "'|V0'", "'<M8[ns]'", "'>f4'", "'f4'", "'<f3'", "'x'", "4"),
    *("'<U1'", "'|b1'", "'<c8'", "None", "'<f4,<f4'", "'" + "<" * 500 + "'"),
)
_RAW = (
    *("1e400", "NaN", "-Infinity", "-1", "1.5", "4611686018427387904", str(2**70), "9" * 5000, "null", "true", '"x"'),
    *('"\\ud800"', '""', "[]", "{}", "[" * 2000 + "]" * 2000, '{"a":' * 2000 + "1" + "}" * 2000, '{"a":1,"a":2}'),
    *('"\\u0000"', "0", f'"{"x" * 1000}"', "[[[[1]]]]", '"../../etc/passwd"', "[null]", "[-1,0]", "[0,0]"),
)

_FIELDS = (  # of a header in an archive, from its flags on: the place, and the bytes written there
    *(
        (0, flags) for flags in (b"\1\0", b"\x20\0", b"\x40\0", b"\x08\0")
    ),  # encrypted, patched, strongly encrypted, sizes after
    *((2, method) for method in (b"\0\0", b"\x63\0", b"\x0c\0")),
    *((at, word) for at in (8, 12, 16) for word in (bytes(4), b"\xff" * 4, b"\1\0\0\0", b"\0\0\0\x7f")),
)


def of_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change, remove, repeat or insert some bytes."""
    made = bytearray(content)
    if not made:
        return bytes(rng.randbytes(rng.randrange(64)))
    at, length = rng.randrange(len(made)), rng.choice((1, 2, 8, 64))
    match rng.randrange(9):
        case 0 | 1:
            for _ in range(rng.choice((1, 1, 2, 8))):
                made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
        case 2:
            del made[at:]
        case 3:
            del made[at : at + length]
        case 4:
            made[at:at] = made[max(0, at - length) : at] or b"\0"
        case 5:
            made[at : at + length] = rng.choice((b"\xff", b"\0", b"\x80", b"\xef\xbb\xbf")) * length
        case 6:
            made += rng.choice((b"\0", bytes(made), b"PK\5\6" + bytes(18), b"\n", b"{}"))
        case 7:
            made[:0] = rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" ", b"PK\3\4", b"{"))
        case _:
            numbers = list(re.finditer(rb"\d+", bytes(made)))
            if numbers:
                one = rng.choice(numbers)
                made[one.start() : one.end()] = rng.choice(_NUMBERS)
    return bytes(made)


def of_array(content: bytes, rng: random.Random) -> bytes:
    """An .npy file whose header says something else."""
    if len(content) < 10 or content[6:8] != b"\1\0":
        return of_bytes(content, rng)
    [length] = struct.unpack("<H", content[8:10])
    header, data = content[10 : 10 + length].decode("latin1"), content[10 + length :]
    match rng.randrange(7):
        case 0 | 1:
            header = re.sub(r"'shape': \([^)]*\)", lambda _: f"'shape': {rng.choice(_SIZES)}", header)
        case 2:
            header = re.sub(r"'descr': '[^']*'", lambda _: f"'descr': {rng.choice(_DESCRIPTIONS)}", header)
        case 3:
            header = header.replace("False", rng.choice(("True", "1", "None", "'x'", "")))
        case 4:
            header = header[: rng.randrange(len(header) + 1)]
        case 5:
            header = rng.choice(
                ("{}", "[]", "1", "__import__('os')", "{'descr': '<f4'}", header.replace(", 'shape'", "}, 'shape'"))
            )
        case _:
            data = rng.choice((data[:-1], data + b"\0", b"", bytes([255]) * len(data)))
    text = header.encode("latin1")
    version, packed = rng.choice(((b"\1\0", "<H"), (b"\1\0", "<H"), (b"\2\0", "<I"), (b"\3\0", "<I"), (b"\4\0", "<I")))
    said = rng.choice((len(text), len(text), len(text), len(text) + 7, 0, 2**16 - 1))
    return b"\x93NUMPY" + version + struct.pack(packed, min(said, 2**16 - 1)) + text + data


def of_archive(content: bytes, rng: random.Random) -> bytes:
    """An archive whose entries are damaged, or whose directory contradicts them."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    except Exception:
        return of_bytes(content, rng)
    kind = rng.randrange(8)
    name, data = entries[rng.randrange(len(entries))] if entries else ("x.npy", b"")
    if kind == 0:
        return of_bytes(content, rng)
    if kind in (1, 2, 3):
        entries = [(one, of_array(held, rng) if one == name else held) for one, held in entries]
    elif kind == 4:
        entries.append(
            (
                rng.choice(
                    (name, name.removesuffix(".npy"), "readme.txt", "../../x.npy", "/x.npy", "a\\b.npy", ".npy", "")
                ),
                data,
            )
        )
    elif kind == 5:
        entries = [(one, held + bytes(rng.choice((1, 1 << 16, 1 << 22)))) for one, held in entries]
    method = rng.choice(
        (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2)
    )
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method if rng.random() < 0.3 else zipfile.ZIP_DEFLATED) as archive:
        for one, held in entries:
            archive.writestr(zipfile.ZipInfo(one), held, archive.compression)
    made = bytearray(written.getvalue())
    if kind >= 6:
        _lie(made, rng)
    return bytes(made)


def _lie(made: bytearray, rng: random.Random) -> None:
    """Change a field of a header before an entry, or of the directory."""
    places = [(one.start(), 30) for one in re.finditer(rb"PK\x03\x04", bytes(made))]
    places += [(one.start(), 46) for one in re.finditer(rb"PK\x01\x02", bytes(made))]
    start, length = rng.choice(places)
    offset = 6 if length == 30 else 8  # of the flags; then method, time, checksum, sizes
    for _ in range(rng.choice((1, 2))):
        field, value = rng.choice(_FIELDS)
        made[start + offset + field : start + offset + field + len(value)] = value
    if length == 46 and rng.random() < 0.3:  # where the entry is
        made[start + 42 : start + 46] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x10\0\0\0"))


def of_json(content: bytes, rng: random.Random) -> bytes:
    """JSON in which a part is changed, missing or repeated."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # it was damaged before
        return of_bytes(content, rng)
    if rng.random() < 0.2:
        return of_bytes(content, rng)
    marks: dict[str, str] = {}
    for _ in range(rng.choice((1, 1, 2))):
        document = _changed(document, rng, marks)
    made = json.dumps(document)
    for mark, raw in marks.items():
        made = made.replace(f'"{mark}"', raw)
    return made.encode()


def _changed(document: Any, rng: random.Random, marks: dict[str, str]) -> Any:
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        one = waiting.pop()
        keys: Any = one if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            places.append((one, key))
            waiting.append(one[key])
    mark = f"mark {len(marks)} {rng.random()}"
    marks[mark] = rng.choice(_RAW)
    if not places or rng.random() < 0.02:
        return mark
    held, key = rng.choice(places)
    match rng.randrange(6):
        case 0:
            del held[key]
        case 1 if isinstance(held, dict):
            held[mark] = held.pop(key)
            marks[mark] = rng.choice(
                ('"__metadata__"', '""', '"x"', *(json.dumps(other) for other in held if other != mark))
            )
        case 2 if isinstance(held, list):
            held.append(held[key])
        case 3:
            other, place = rng.choice(places)
            try:
                held[key] = json.loads(json.dumps(other[place]))
            except (KeyError, IndexError):
                held[key] = None
        case _:
            held[key] = mark
    return document


def of_lines(content: bytes, rng: random.Random) -> bytes:
    """Lines of JSON, one of which is damaged, missing, repeated or moved."""
    lines = content.splitlines(keepends=True)
    if not lines or rng.random() < 0.1:
        return of_bytes(content, rng)
    at = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case 2:
            rng.shuffle(lines)
        case _:
            lines[at] = of_json(lines[at], rng).replace(b"\n", b" ") + b"\n"
    return b"".join(lines)


def of_safetensors(content: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is damaged, or the JSON in its metadata."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = rng.randrange(6)
    if kind == 0:
        return of_bytes(content, rng)
    try:
        document = json.loads(header)
    except (ValueError, RecursionError):
        return of_bytes(content, rng)
    metadata = document.get("__metadata__") if isinstance(document, dict) else None
    if kind in (1, 2, 3) and metadata and isinstance(metadata, dict):
        name = rng.choice(list(metadata))
        metadata[name] = of_json(str(metadata[name]).encode(errors="replace"), rng).decode("utf-8", "replace")
        made = json.dumps(document).encode()
    else:
        made = of_json(header, rng)
    said = rng.choice((len(made),) * 8 + (len(made) + 1, 0, 2**63, 2**64 - 1))
    return (
        said.to_bytes(8, "little")
        + made
        + (data if kind != 5 else rng.choice((data[:-1], data + b"\0", bytes([255]) * len(data))))
    )


def of_toml(content: bytes, rng: random.Random) -> bytes:
    """Records with other values, keys or tables."""
    text = content.decode(errors="replace")
    values = list(re.finditer(r'"[^"]*"', text))
    if rng.random() < 0.3 or not values:
        return of_bytes(content, rng)
    one = rng.choice(values)
    raw = rng.choice((*_RAW, "nan", "inf", "2026-01-01", "'''x", "[[x]]", '"\\u0000"'))
    return (text[: one.start()] + raw + text[one.end() :]).encode()


def of_value(content: bytes, rng: random.Random) -> bytes:
    """A tensor in protobuf with another size, type, or place of its data; or a sequence in its place."""
    tensor = TensorProto()
    try:
        tensor.ParseFromString(content)
    except Exception:
        return of_bytes(content, rng)
    match rng.randrange(8):
        case 0:
            tensor.dims[:] = rng.choice(((-1,), (2**62, 4), (2**63 - 1,), (0, 2**62), (1,) * 100, ()))
        case 1:
            tensor.data_type = rng.choice((0, 8, 9, 10, 14, 16, 17, 23, 24, 99, -1, 2**31 - 1))
        case 2:
            tensor.raw_data = tensor.raw_data[:-1]
        case 3:
            tensor.float_data.extend([1.0] * rng.choice((1, 3)))
        case 4:
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=rng.choice(("/etc/passwd", "../x", "x.bin", "")))
        case 5:
            tensor.string_data.extend([b"\xff", b"a"])
        case 6:
            held = SequenceProto(elem_type=rng.choice((0, 1, 2, 99)), tensor_values=[tensor] * 2, name=tensor.name)
            return held.SerializeToString()
        case _:
            return of_bytes(content, rng)
    return tensor.SerializeToString()


DAMAGES: Mapping[str, Damage] = {
    "archive": of_archive,
    "array": of_array,
    "json": of_json,
    "lines": of_lines,
    "safetensors": of_safetensors,
    "toml": of_toml,
    "value": of_value,
}


def damaged(content: bytes, kind: str, rng: random.Random) -> bytes:
    """A file of this kind, damaged once or twice."""
    for _ in range(rng.choice((1, 1, 1, 2))):
        content = DAMAGES[kind](content, rng)
    return content

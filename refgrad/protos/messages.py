"""The size of protobuf messages, of which a file has at most 2 GB."""

from __future__ import annotations

from google.protobuf.message import EncodeError, Message

LARGEST = 2**31 - 1  # bytes of a message


def is_too_large(message: Message) -> bool:
    """True if a message cannot be written: protobuf does not even tell the size of some of these."""
    try:
        return message.ByteSize() > LARGEST
    except (EncodeError, ValueError):
        return True

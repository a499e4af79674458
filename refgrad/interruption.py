"""Ctrl-C while the command `refgrad` imports: it ends with its exit code, and without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

CODE = 130  # the exit code of a command that was interrupted


def end_quietly() -> None:
    """Let Ctrl-C end this process at once if it is the command, which has nothing to clean up yet."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # in the background it is ignored
    if is_usual and _is_command() and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again: the command has begun."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(CODE)


def _is_command() -> bool:
    """Whether this process was started as `refgrad` or `python -m refgrad`."""
    if getattr(sys, "argv", [])[:1] != ["-m"]:  # which it is until Python has found the module
        return bool(getattr(sys, "argv", [])) and Path(sys.argv[0]).stem == "refgrad"
    words = sys.orig_argv
    return "-m" in words and words[words.index("-m") + 1 :][:1] == ["refgrad"]

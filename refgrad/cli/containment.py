"""A command in a process of its own: what a malformed file makes of a library then ends that process, with a message."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from refgrad.worker import last_words, limit_room

_PATIENCE = 1.0  # seconds
_BY_A_PROCESS = 0  # SI_USER of <signal.h>: a signal that kill() sent
_END_ON_DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
_FRAME = re.compile(r'^  File "(.+)", line \d+ in (\S+)', re.MULTILINE)
_COPIES = 2  # how much more than the values that it holds a command may take: kernels and files need copies
_SLACK = 1 << 27  # bytes for everything else
_STOPPED = 1  # the exit code of a process that faulthandler ends

_GRACE = 3.0  # seconds that a command whose time is over has to end by itself
_TIMEOUT = re.compile(r"^Timeout \(", re.MULTILINE)  # faulthandler's first line

_is_contained = False
_said: IO[bytes] | None = None  # what the copy says of its death


def contain(refused: int, complain: Callable[[str], None]) -> None:
    """Go on in a copy of this process, where the system can make one. This one waits for it and ends as it does.

    If the copy dies, this process complains and ends with the code `refused`. A copy takes milliseconds to make; a new process
    would import everything again.
    """
    global _is_contained, _said
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return
    _flush()
    gc.freeze()  # a collection in the copy would write to all that the two share
    said = last_words()  # the copy writes to it until it ends
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries have threads, which they start again in a copy
        child = os.fork()
    if not child:
        _is_contained, _said = True, said
        ctypes.CDLL(None).prctl(_END_ON_DEATH_OF_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(refused)
        faulthandler.enable(said)
        return
    waiting = {signal.SIGINT, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended:
        told = signal.sigtimedwait(waiting, _PATIENCE)
        if told is not None and told.si_signo == signal.SIGINT and told.si_code == _BY_A_PROCESS:
            os.kill(child, signal.SIGINT)  # the terminal tells both
        ended, status = os.waitpid(child, os.WNOHANG)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
    status = os.waitstatus_to_exitcode(status)
    if status < 0 or (status == _STOPPED and _TIMEOUT.search(_words(said))):
        status = _died(-status, said, refused, complain)
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # the shell closed it
            stream.flush()


def _died(number: int, said: IO[bytes], refused: int, complain: Callable[[str], None]) -> int:
    if number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGPIPE,
        signal.SIGQUIT,
    ):  # somebody wanted it to
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if number == signal.SIGKILL:
        complain(
            "The process of this command was killed. The system does that where memory runs out: "
            "a file that it read asks for more than there is."
        )
        return refused
    words = _words(said)
    if number == -_STOPPED:
        complain(words.partition("\n")[0])
        return refused
    frames = _FRAME.findall(words)
    place = f" in {frames[0][1]} of {'/'.join(Path(frames[0][0]).parts[-2:])}" if frames else ""
    complain(
        f"The process of this command died{place}: {signal.strsignal(number)}. "
        "A file that it read is malformed in a way that no check has found, or asks for more than --max-memory."
    )
    return refused


def _words(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode(errors="replace")


@contextmanager
def end_later(seconds: float, message: str) -> Iterator[None]:
    """End a contained command soon after so many seconds, whatever native code it is in then. It complains by `message`."""
    if not _is_contained or _said is None:
        yield
        return
    _said.write(f"{message}\n".encode())
    _said.flush()
    faulthandler.dump_traceback_later(seconds + _GRACE, exit=True, file=_said)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def limit_memory(size: int) -> None:
    """Let this command take no more memory than values of `size` bytes need, where it has a process of its own."""
    if _is_contained:
        limit_room(_COPIES * size + _SLACK)

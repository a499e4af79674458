"""A process that calls functions for this one: what can abort, or run for ever, then ends that process and not this one."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ParamSpec, TypeVar

from google.protobuf.message import EncodeError

from refgrad import links
from refgrad.errors import InvalidModelError, OptionError, RefgradError, WorkerError, message_of
from refgrad.notices import notice
from refgrad.ranges import RANGES

P = ParamSpec("P")
R = TypeVar("R")

SECONDS = 60.0
_PROTOBUF_LIMIT = 2**31 - 1
_LONGEST = 2000  # characters of an exception's message that come back
_LAST_WORDS = 2.0  # seconds that a process has to end after it closed its pipe
_RESERVED = 1 << 30  # bytes of address space that the libraries reserve, where the system does not say
_ORPHANED = 1.0  # seconds until a process notices that it belongs to nobody any more
# The program of the process. Before it imports anything that takes time, it asks the system to kill it and what it started as
# soon as the other end of the lifeline, a pipe, is closed: that end closes when its holder dies, and this process may then be
# in native code that never returns. 10 is F_SETSIG of Linux's <fcntl.h>; to the pipe nothing is ever written.
# What PYTHONPATH cannot hold, a folder with a colon in its name, comes as an argument.
_START = """import os, signal, sys
memory, room, lifeline = map(int, sys.argv[1:4])
if lifeline >= 0:
    import fcntl
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, 10, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)
    except OSError:  # the other end is open, or the system cannot do this
        pass
sys.path.extend(folder for folder in sys.argv[4:] if folder not in sys.path)
from refgrad.worker import serve
serve(memory, room)
"""
_NATIVE_DEATHS = {-signal.SIGSEGV, -signal.SIGABRT}  # what native code dies of when an allocation fails
_NO_MEMORY = re.compile("bad_?alloc|bad allocation|out of memory|cannot allocate|failed to allocate|MemoryError", re.I)


class Worker:
    """The process is started when it is needed, serves many calls, and is started again after it died.

    Calls from several threads are served one after the other.

    >>> import math
    >>> with Worker() as worker:
    ...     worker.call(math.gcd, 12, 18)
    6

    :param seconds: how long one call may take, the start of the process included.
    :param memory: how many bytes the process may have, where the system can limit it (not on Windows); 0 for any number.
    :param room: how many bytes it may have in addition to the libraries that the first call needs; 0 for any number.
    :param environment: variables of its environment. It has the other variables from this process.
    """

    def __init__(
        self, seconds: float = SECONDS, memory: int = 0, room: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        self.seconds, self.memory, self.room, self.environment = seconds, memory, room, dict(environment or {})
        self._turn = threading.Lock()
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None  # its stderr: a pipe that nobody reads would block it
        self._lifeline: IO[bytes] | None = None  # the process ends when this end of a pipe is closed

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The result of `function`, one of a module, in the other process. Everything that goes there and back is pickled.

        :raises WorkerError: it raised, the process ended, or the time or the memory was over.
        """
        with self._turn:
            return self._call(function, arguments, keywords)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        late = threading.Event()
        try:
            asked = pickle.dumps((function, arguments, keywords))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise OptionError(
                f"What is asked of another process has to be pickled: {error}. Give a model or its path, and lists of names."
            ) from error
        process, said = self._started()

        def stop() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(self.seconds, stop)
        timer.start()
        is_over = False
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with _error_instead_of_signal():
                process.stdin.write(asked)
                process.stdin.flush()
            result, failure = pickle.load(process.stdout)
            is_over = True
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = _end(process)
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            if late.is_set():
                raise WorkerError("timed out", f"nothing came back after {self.seconds:g} s") from error
            message = lines[-1] if lines else ""
            starved = self.room and code in _NATIVE_DEATHS and "Assertion" not in message
            exhausted = starved or (self._is_limited and _NO_MEMORY.search(message))
            verdict = "out of memory" if exhausted else "crashed"
            raise WorkerError(verdict, f"its process ended with {_told(code)}{message and f': {message}'}") from error
        finally:
            timer.cancel()
            if not is_over or process.poll() is not None or late.is_set():
                self.close()  # an interrupted call would be answered in place of the next one
        if failure is not None:
            raised, message, classes = failure
            exhausted = raised == "MemoryError" or (self._is_limited and _NO_MEMORY.search(message))
            raise WorkerError("out of memory" if exhausted else "raised", message, raised, classes)
        return result

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        return self._stopped

    @property
    def ended(self) -> str:
        """How the process ended since the last call, "" if it has not: the next call starts another one."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"its process ended with {_told(code)}"

    @property
    def _is_limited(self) -> bool:
        return bool(self.memory or self.room)

    def stop(self) -> None:
        """End the process and call nothing any more: a call that waits in another thread fails at once."""
        self._stopped = True
        if (process := self._process) is not None:
            _kill(process)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._said is not None:
            _kill(self._process)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._said, self._lifeline):
                if pipe is not None:
                    _close(pipe)
            self._process = self._said = self._lifeline = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._stopped:
            raise WorkerError("crashed", "the run has ended")
        if self._process is None or self._said is None:
            self._said = last_words()
            folders = [folder for folder in sys.path if folder]
            with _lifeline() as (held, self._lifeline):
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(self.memory), str(self.room), str(held), *folders],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                    env=os.environ | self.environment | {"PYTHONPATH": os.pathsep.join(folders)},
                    start_new_session=True,
                    pass_fds=() if held < 0 else (held,),
                )
            if self._stopped:  # meanwhile, by another thread
                _kill(self._process)
        return self._process, self._said


@contextlib.contextmanager
def _lifeline() -> Iterator[tuple[int, IO[bytes] | None]]:
    """A pipe for `_START`: the descriptor that the new process inherits in the block, and the end that this one keeps."""
    if not sys.platform.startswith("linux"):
        yield -1, None
        return
    held, kept = os.pipe()
    try:
        yield held, os.fdopen(kept, "wb", buffering=0)
    finally:
        os.close(held)


def last_words() -> IO[bytes]:
    """A file for what a process says when it dies. On Linux it lies in memory: a disk may be full, or read-only."""
    if in_memory := getattr(os, "memfd_create", None):
        return os.fdopen(in_memory("refgrad"), "w+b")
    return tempfile.TemporaryFile(prefix="refgrad-")


def _is_too_large(argument: Any) -> bool:
    """True for a protobuf message that cannot be written. Of some of these protobuf does not even tell the size."""
    size = getattr(argument, "ByteSize", None)
    try:
        return size is not None and size() > _PROTOBUF_LIMIT
    except (EncodeError, ValueError):
        return True


def limited(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with the limits `max_memory` and `max_seconds`, and with `data_folders`.

    With a limit it runs in a process of its own, and its errors and warnings appear here. That process knows the operators of
    plug-ins, not those that this process registered by itself.
    """

    @wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        memory: Any = keywords.pop("max_memory", None)
        seconds: Any = keywords.pop("max_seconds", None)
        folders: Any = keywords.pop("data_folders", None)
        if memory is None and seconds is None:
            with links.data_in(folders):
                return function(*arguments, **keywords)
        _check_limits(memory, seconds)
        keywords["data_folders"] = links.named(folders)
        for argument in (*arguments, *keywords.values()):
            if _is_too_large(argument):
                raise InvalidModelError(
                    "A model over 2 GB cannot be handed to another process, as max_memory and max_seconds ask for: save it "
                    "with external data, and give its path."
                )
        with Worker(threading.TIMEOUT_MAX if seconds is None else seconds, room=memory or 0) as worker:
            try:
                result: R
                error: RefgradError | None
                result, error, notices = worker.call(_result_or_error, call, arguments, keywords)
            except WorkerError as failure:
                raise _met(failure, function.__name__, memory, seconds) from failure
        for met in notices:
            notice(met)
        if error is None:
            return result
        if memory is not None and _NO_MEMORY.search(str(error)):
            raise _met(WorkerError("out of memory", str(error)), function.__name__, memory, seconds) from error
        raise error

    return call


def _check_limits(memory: Any, seconds: Any) -> None:
    if memory is not None and RANGES["max_memory"].why_not(memory):
        raise OptionError(f"max_memory={memory!r} is not a number of bytes above 0. Give one, or None for no limit.")
    if seconds is not None and RANGES["max_seconds"].why_not(seconds):
        raise OptionError(
            f"max_seconds={seconds!r} is not a number of seconds above 0. Give one, or None for no limit."
        )


def _result_or_error(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, RefgradError | None, list[Warning]]:
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        try:
            result, failure = function(*arguments, **keywords), None
        except RefgradError as error:
            result, failure = None, error.with_traceback(None)
    return result, failure, [one.message for one in met if isinstance(one.message, Warning)]


def _met(failure: WorkerError, what: str, memory: int | None, seconds: float | None) -> WorkerError:
    """The error that names the limit which a call met."""
    verdict = failure.verdict
    if verdict == "timed out":
        said = f"{what} did not finish within max_seconds={seconds:g}. Give it more time, or do not take this model"
    elif verdict == "out of memory" and memory is not None:
        said = (
            f"{what} needs more than max_memory={memory}, {memory / 2**20:.4g} MiB ({failure}). "
            "Give it more, or do not take this model"
        )
    else:
        said = f"{what} {verdict} in a process of its own: {failure}"
    return WorkerError(verdict, said, failure.raised, failure.classes)


def _end(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process that closed its end of the pipe: it may still be about to end by itself."""
    try:
        return process.wait(_LAST_WORDS)
    except subprocess.TimeoutExpired:
        _kill(process)
        return process.wait()


def _told(code: int) -> str:
    """The exit code of a process, with the name of the signal that ended it."""
    try:
        return f"{code} ({signal.Signals(-code).name})"
    except ValueError:
        return str(code)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started: one of these would keep the pipe open."""
    if sys.platform == "win32":
        process.kill()
    elif process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or is not yet in its own group
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _close(pipe: IO[bytes]) -> None:
    # What was not written is of no use any more.
    with contextlib.suppress(BrokenPipeError), _error_instead_of_signal():
        pipe.close()


@contextlib.contextmanager
def _error_instead_of_signal() -> Iterator[None]:
    """Writing to a process that is gone raises, also in a program that lets SIGPIPE end it, as `refgrad` does."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        yield
    finally:
        if signal.SIGPIPE in signal.sigpending() and signal.SIGPIPE not in before:
            signal.sigwait({signal.SIGPIPE})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(memory: int, room: int = 0) -> None:
    """The loop of the process: read a call, make it, answer with the result or with the exception's class and message.

    Until stdin ends.
    """
    threading.Thread(target=_outlive_nobody, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    _limit(memory)
    while True:
        try:
            function, arguments, keywords = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if room:
            limit_room(room)
            room = 0
        reply: tuple[Any, tuple[str, str, list[str]] | None]
        try:
            reply = function(*arguments, **keywords), None
        except Exception as error:  # whatever it is, the caller has to know
            name = type(error).__name__
            said = message_of(error)[:_LONGEST].encode(errors="backslashreplace").decode()
            reply = None, (name, said or name, _classes(error))
        pickle.dump(reply, answers)
        answers.flush()


def _classes(error: Exception) -> list[str]:
    """The names of an error's class and its bases. An error of refgrad counts as NotImplementedError if its cause is one."""
    wrapped = isinstance(error, RefgradError) and isinstance(error.__cause__, NotImplementedError)
    return [kind.__name__ for kind in type(error).__mro__] + ["NotImplementedError"] * wrapped


def _limit(memory: int) -> None:
    """Let this process, and those that it starts, take no more than `memory` bytes, or less where it may have less already."""
    if memory and sys.platform != "win32":
        import resource

        before, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = memory if before == resource.RLIM_INFINITY else min(memory, before)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def limit_room(room: int) -> None:
    """Let this process take no more than `room` bytes beside those that it has, where the system can limit it."""
    _limit(_taken() + room)


def _taken() -> int:
    """How many bytes of address space this process has, most of which libraries only reserve."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _RESERVED


def _outlive_nobody(parent: int) -> None:
    """End this process, whatever it is doing, when the one that it works for is gone: killed, it closes nothing."""
    while os.getppid() == parent:
        time.sleep(_ORPHANED)
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)

"""A worker: what it returns, and every way in which nothing comes back."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from refgrad.errors import BackendError, WorkerError
from refgrad.worker import Worker

pytestmark = [pytest.mark.interpreter, pytest.mark.slow]


def test_results_come_back():
    with Worker() as worker:
        assert worker.call(math.gcd, 12, 18) == 6
        assert worker.call(dict, a=1) == {"a": 1}


def test_many_calls_in_one_process():
    with Worker() as worker:
        assert worker.call(os.getpid) == worker.call(os.getpid) != os.getpid()


def test_every_thread_gets_its_own_results():
    with Worker() as worker, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda k: worker.call(math.gcd, 6 * k, 9 * k), range(40))) == [3 * k for k in range(40)]


def test_an_exception_comes_back_as_its_message_and_leaves_the_process_alive():
    with Worker() as worker:
        process = worker.call(os.getpid)
        with pytest.raises(WorkerError, match=r"math domain error|nonnegative") as raised:
            worker.call(math.sqrt, -1.0)
        assert raised.value.verdict == "raised"
        assert worker.call(os.getpid) == process


def test_what_is_printed_is_no_answer():
    with Worker() as worker:
        assert worker.call(print, "loud") is None
        assert worker.call(os.write, 1, b"louder") == 6


def test_a_process_that_dies_at_work_has_crashed_and_is_started_again():
    with Worker() as worker:
        with pytest.raises(WorkerError, match=f"ended with -{int(signal.SIGABRT)}") as raised:
            worker.call(os.abort)
        assert raised.value.verdict == "crashed"
        assert worker.call(math.gcd, 12, 18) == 6


def test_what_a_dying_process_said_is_in_the_message():
    with Worker() as worker:
        worker.call(os.write, 2, b"gone")
        with pytest.raises(WorkerError, match="gone"):
            worker.call(os._exit, 3)


def test_a_process_that_takes_too_long_is_stopped_and_started_again():
    with Worker(seconds=0.5) as worker:
        with pytest.raises(WorkerError, match=r"nothing came back after 0\.5 s") as raised:
            worker.call(time.sleep, 60)
        assert raised.value.verdict == "timed out"
        worker.seconds = 60
        assert worker.call(math.gcd, 12, 18) == 6


def test_a_process_that_died_between_calls_is_started_again():
    with Worker() as worker:
        os.kill(worker.call(os.getpid), signal.SIGKILL)
        time.sleep(0.1)
        assert worker.call(math.gcd, 12, 18) == 6


def test_closing_leaves_no_process():
    with Worker() as worker:
        process = worker.call(os.getpid)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def path() -> list[str]:
    """Where this process looks for modules; to call it is to find this one."""
    return sys.path


def test_the_process_finds_the_same_modules(monkeypatch, tmp_path):
    odd = tmp_path / "with:colon"
    odd.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(odd)])
    with Worker() as worker:
        found = {os.path.abspath(folder) for folder in worker.call(path)}
    assert {os.path.abspath(folder) for folder in sys.path if folder} <= found


def test_what_needs_more_memory_than_there_is_says_so_and_leaves_the_process_alive():
    with Worker(memory=2 << 30) as worker:
        process = worker.call(os.getpid)
        with pytest.raises(WorkerError) as raised:
            worker.call(bytearray, 3 << 30)
        assert (raised.value.verdict, raised.value.raised) == ("out of memory", "MemoryError")
        assert worker.call(os.getpid) == process


def test_the_class_of_an_exception_comes_back():
    with Worker() as worker:
        with pytest.raises(WorkerError) as raised:
            worker.call(int, "x")
        assert (raised.value.verdict, raised.value.raised) == ("raised", "ValueError")


class SilentError(ArithmeticError):
    def __str__(self):
        raise RuntimeError("no words")


def silent():
    raise SilentError


def wrapping():
    raise BackendError("it failed") from NotImplementedError("Exp")


def test_an_exception_without_a_message_has_its_class():
    with Worker() as worker:
        process = worker.call(os.getpid)
        with pytest.raises(WorkerError, match=r"^SilentError$") as raised:
            worker.call(silent)
        assert raised.value.raised == "SilentError"
        assert raised.value.classes[:3] == ("SilentError", "ArithmeticError", "Exception")
        with pytest.raises(WorkerError) as raised:
            worker.call(wrapping)
        assert raised.value.raised == "BackendError"
        assert "NotImplementedError" in raised.value.classes
        assert worker.call(os.getpid) == process


def test_the_exit_code_is_that_of_the_process():
    with Worker() as worker, pytest.raises(WorkerError, match="ended with 3"):
        worker.call(sys.exit, 3)


def _left(process: int) -> bool:
    """True if a process is there, a moment later."""
    for _ in range(100):
        try:
            os.kill(process, 0)
            if "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]:
                return False
        except (ProcessLookupError, FileNotFoundError):
            return False
        time.sleep(0.1)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_a_process_started_ends_with_it():
    with Worker(seconds=3.0) as worker:
        child = worker.call(os.posix_spawn, "/bin/sleep", ["sleep", "600"], os.environ.copy())
        with pytest.raises(WorkerError, match="nothing came back"):
            worker.call(time.sleep, 60)
    assert not _left(child)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_at_work_does_not_outlive_the_one_it_works_for():
    text = (
        "import os, time, threading\nfrom refgrad.worker import Worker\nworker = Worker()\n"
        "print(worker.call(os.getpid), flush=True)\nworker.call(time.sleep, 600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    assert not _left(child)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_still_imports_does_not_outlive_the_one_it_works_for(tmp_path):
    package = tmp_path / "refgrad"
    package.mkdir()
    (package / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    text = (
        "import sys, time\nfrom refgrad.worker import Worker\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\nprint(Worker()._started()[0].pid, flush=True)\ntime.sleep(600)"
    )
    elsewhere = tmp_path / "elsewhere"  # the current folder comes first on the path of both
    elsewhere.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=elsewhere)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1)
    parent.kill()
    parent.communicate()
    assert not _left(child)


def test_a_worker_that_was_stopped_fails_at_once_and_for_good():
    worker = Worker()
    with ThreadPoolExecutor(1) as pool:
        worker.call(math.gcd, 2, 4)
        waiting = pool.submit(worker.call, time.sleep, 60)
        time.sleep(0.5)
        start = time.monotonic()
        worker.stop()
        with pytest.raises(WorkerError):
            waiting.result()
        with pytest.raises(WorkerError, match="the run has ended"):
            worker.call(math.gcd, 2, 4)
    assert time.monotonic() - start < 10
    worker.close()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no such signal")
def test_a_process_that_is_gone_does_not_end_a_program_that_sigpipe_ends():
    text = (
        "import math, os, signal\nfrom refgrad.errors import WorkerError\nfrom refgrad.worker import Worker\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nworker = Worker(seconds=0)\n"
        "for _ in range(20):\n    try:\n        worker.call(len, bytes(1 << 20))\n    except WorkerError:\n        pass\n"
        "worker.seconds = 60\nprint(worker.call(math.gcd, 12, 18), signal.getsignal(signal.SIGPIPE).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "6 SIG_DFL\n", "")


def test_a_message_comes_back_in_what_can_be_written_and_no_longer_than_it_can_be_read():
    with Worker() as worker:
        with pytest.raises(WorkerError) as raised:
            worker.call(exec, "raise ValueError(chr(0xd800) + 'x' * 100_000)")
        assert str(raised.value).startswith("\\ud800x")
        assert len(str(raised.value)) < 3000


_NATIVE = "import re; re.match('(a+)+$', 'a' * 60 + 'b')"  # which never returns, and keeps the lock of the interpreter


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere a thread looks, which native code may keep waiting"
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_in_native_code_ends_with_the_one_that_it_works_for(number):
    program = (
        "import os; from refgrad.worker import Worker\n"
        "worker = Worker(); print(worker.call(os.getpid), flush=True)\n"
        f"worker.call(exec, {_NATIVE!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        worker = Path("/proc") / process.stdout.readline().strip()
        time.sleep(1)
        process.send_signal(number)
        process.wait(10)
        for _ in range(50):
            if not worker.exists() or "\nState:\tZ" in (worker / "status").read_text():
                return
            time.sleep(0.1)
    os.kill(int(worker.name), signal.SIGKILL)
    pytest.fail("the worker went on")

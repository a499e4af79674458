"""The examples in examples/many_processes: two processes end at the weights of one, by whatever they talk to each other."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "many_processes"
EQUAL = 1e-6
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # a machine may have one core
}


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def run(*command: str, folder: Path) -> dict[str, np.ndarray]:
    """Run a program whose last argument is the file of its results, and return these."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    env = os.environ | SETTINGS | {"PYTHONPATH": path}
    result = folder / "result.npz"
    done = subprocess.run([*command, str(result)], capture_output=True, text=True, timeout=240, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    with np.load(result) as arrays:
        return dict(arrays)


def torchrun(count: int, name: str, folder: Path) -> dict[str, np.ndarray]:
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
    return run(*start, str(FOLDER / name), folder=folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run(sys.executable, str(FOLDER / "problem.py"), folder=tmp_path_factory.mktemp("alone"))


def check_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=EQUAL, err_msg=name)


@needs("torch")
def test_torch_distributed(alone: dict[str, np.ndarray], tmp_path: Path) -> None:
    check_equal(torchrun(2, "torch_distributed.py", tmp_path), alone)


@needs("mpi4py")
def test_mpi(alone: dict[str, np.ndarray], tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    check_equal(run(mpirun, "-n", "2", sys.executable, str(FOLDER / "mpi.py"), folder=tmp_path), alone)


@needs("dask.distributed")
def test_dask(alone: dict[str, np.ndarray], tmp_path: Path) -> None:
    check_equal(run(sys.executable, str(FOLDER / "dask_workers.py"), folder=tmp_path), alone)


@needs("torch")
def test_a_layer_in_distributed_data_parallel(tmp_path: Path) -> None:
    check_equal(torchrun(2, "torch_ddp.py", tmp_path), torchrun(1, "torch_ddp.py", tmp_path))


def test_every_example_is_tried() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(file.name in text for file in FOLDER.glob("*.py"))

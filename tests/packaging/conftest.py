"""Environments for tests of an installation, made without installing what refgrad needs once more for each."""

import sysconfig
import venv

import pytest


@pytest.fixture(scope="session")
def make_environment():
    """What makes an environment in a folder: it has pip, and finds what is installed in that of the tests."""

    def make(folder):
        venv.create(folder, with_pip=True)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    return make

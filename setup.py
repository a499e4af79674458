"""The packages by rule: folders with an `__init__.py` in those of FOLDERS. pyproject.toml has the rest."""

from setuptools import find_packages, setup

FOLDERS = {
    "refgrad": "refgrad",
    "refgrad.backends": "backends",
    "refgrad.conformance": "conformance",
    "refgrad.reports": "reports",
}

setup(
    packages=sorted(  # a set: the links in refgrad/ lead to the other two again
        {
            name
            for top, folder in FOLDERS.items()
            for name in (top, *(f"{top}.{inner}" for inner in find_packages(folder)))
        }
    )
)

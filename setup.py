"""The packages by rule: folders with an `__init__.py` in refgrad/, backends/ and conformance/. pyproject.toml has the rest."""

from setuptools import find_packages, setup

FOLDERS = {"refgrad": "refgrad", "refgrad.backends": "backends", "refgrad.conformance": "conformance"}

setup(
    packages=[
        name
        for top, folder in FOLDERS.items()
        for name in (top, *(f"{top}.{inner}" for inner in find_packages(folder)))
    ]
)

"""What pyproject.toml cannot say: the packages by rule, and the addresses of the repository. pyproject.toml has the rest.

The packages are the folders with an `__init__.py` in those of FOLDERS. The addresses come from the two variables that GitHub
sets in every job, so a release links to the repository that made it. A build elsewhere has no addresses.
"""

import os

from setuptools import find_packages, setup

FOLDERS = {
    "refgrad": "refgrad",
    "refgrad.backends": "backends",
    "refgrad.conformance": "conformance",
    "refgrad.reports": "reports",
}


def project_urls() -> dict[str, str]:
    """The addresses of the repository's pages by their titles; none where the repository is unknown."""
    server, name = (os.environ.get(f"GITHUB_{key}", "") for key in ("SERVER_URL", "REPOSITORY"))
    if not (server and name):
        return {}
    top = f"{server}/{name}"
    blob = f"{top}/blob/main"
    return {
        "Source": top,
        "Documentation": f"{blob}/docs/README.md",
        "Issues": f"{top}/issues",
        "Changelog": f"{blob}/CHANGELOG.md",
    }


setup(
    packages=sorted(  # a set: the links in refgrad/ lead to the other two again
        {
            name
            for top, folder in FOLDERS.items()
            for name in (top, *(f"{top}.{inner}" for inner in find_packages(folder)))
        }
    ),
    project_urls=project_urls(),
)

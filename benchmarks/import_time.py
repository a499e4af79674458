"""Time of `import refgrad` over `import onnx`, each in processes of their own.

python benchmarks/import_time.py
"""

from __future__ import annotations

import os
import subprocess
import sys

from timing import alternate, save

# Modules are compiled once and kept, as they are after an install.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def start(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True, env=ENVIRONMENT)


def main() -> None:
    ours, theirs, _ = alternate(lambda: start("import refgrad"), lambda: start("import onnx"), 15)
    save(
        "import_time",
        [{"import refgrad s": round(ours, 3), "import onnx s": round(theirs, 3), "over it s": round(ours - theirs, 3)}],
    )


if __name__ == "__main__":
    main()

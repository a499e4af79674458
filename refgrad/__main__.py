"""`python -m refgrad` is the command `refgrad`."""

import sys

from refgrad.cli import main

if __name__ == "__main__":
    sys.exit(main())

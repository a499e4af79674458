"""The templates of random graphs: a module per family."""

from refgrad.tables.families import import_families

import_families(__name__, __path__)

"""What random graphs are made of: a module of templates per family."""

from refgrad.tables.families import import_families

import_families(__name__, __path__)

"""Files that are damaged or lie, and everything that reads one."""

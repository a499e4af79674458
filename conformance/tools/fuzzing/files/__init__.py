"""Files that are damaged or contradict themselves, and everything that reads one."""

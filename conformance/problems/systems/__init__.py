"""The systems that are examined: builders, which write gradients, and executors, which run models; refgrad's own and others."""

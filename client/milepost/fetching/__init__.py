"""From a checkpoint's files into memory: what is wanted of its blobs, checked, once a node."""

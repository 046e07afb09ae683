"""Ranks on separate hosts: a network namespace each, and a wire between them that can be cut, slow or lossy."""

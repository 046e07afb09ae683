"""The tests are a package, so that rank processes can import their functions by name."""

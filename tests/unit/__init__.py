"""Pure tests, each under ten milliseconds."""

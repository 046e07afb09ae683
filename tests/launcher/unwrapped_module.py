"""Imported by `unwrapped_script`: what is in it stays."""

from typing import Any

#: of the models that iterations made, references that keep none
models: list[Any] = []

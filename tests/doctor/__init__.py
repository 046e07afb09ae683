"""Tests of `inprocess doctor`."""

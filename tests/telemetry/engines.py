"""The engines of queries, as parameters of tests."""

from __future__ import annotations

import importlib.util

import pytest

needs_duckdb = pytest.mark.skipif(
    importlib.util.find_spec("duckdb") is None, reason='needs pip install "monarch_backend[duckdb]"'
)
each_engine = pytest.mark.parametrize("engine", ["sqlite", pytest.param("duckdb", marks=needs_duckdb)])

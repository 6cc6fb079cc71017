"""The fixture of tests/load/conftest.py that runs the load stage."""

from tests.load.conftest import load  # noqa: F401 - a fixture

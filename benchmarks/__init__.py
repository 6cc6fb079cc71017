"""Comparisons with other toolchains; README.md lists the commands."""

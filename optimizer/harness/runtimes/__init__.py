"""Runtimes of the harness: one folder per runtime, with an implementation of runner.Runner.

A runtime's package is imported when a Runner is created, not before.
"""

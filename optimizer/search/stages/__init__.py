"""Stages of a search: each reads folders of the store and writes one."""

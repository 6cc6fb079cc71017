"""Folders for other projects' engines, judged by those projects' own readers."""

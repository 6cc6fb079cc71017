"""Ledger hops of folders for other projects' engines, checked with these projects' own readers."""

"""Batches and slots: which waiting requests run next."""

"""Answers over the network: what `python -m harness serve` runs.

batching.py   which waiting rows run next, and which are refused; pure, without clock or thread
costs.py      how long a batch takes, measured at warm-up
"""

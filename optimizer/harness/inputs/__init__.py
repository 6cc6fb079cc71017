"""Encode inputs into the arrays of a model: one file per kind of input, which ends in its record.

kind.py defines `InputKind`, batch.py the arrays that it returns. A task's record (tasks/) names its
kind of input, and so does the contract.
"""

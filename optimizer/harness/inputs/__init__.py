"""From what a model is asked to the arrays it takes: a file per kind of input, with its record.

kind.py says what a kind of input is, batch.py what it makes. A task names its kind in its record
(tasks/), and a contract repeats it.
"""

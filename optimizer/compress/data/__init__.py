"""The token batches that a compression looks at."""

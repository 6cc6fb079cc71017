"""Documents beside a bundle: contents, provenance, signature, seal."""

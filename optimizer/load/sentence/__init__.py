"""Read a sentence-transformers folder, and compare the reading with the library."""

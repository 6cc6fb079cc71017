"""Recipe sections about compression, and the table of its methods."""

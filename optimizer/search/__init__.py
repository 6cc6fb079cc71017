"""Search for the fastest, or smallest, form of a model that keeps its margins, by trials."""

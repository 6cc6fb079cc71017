"""Search for the fastest or smallest variant of a model that keeps its margins, by trials."""

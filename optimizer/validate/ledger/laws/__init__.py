"""Laws that a state, a graph, a contract or an answer obeys, one subject per file."""

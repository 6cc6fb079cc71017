"""Laws that a state, a graph or a contract obeys, a file per subject."""

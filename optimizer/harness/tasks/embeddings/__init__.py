"""Tasks whose answer is a vector of each text, or of each token."""

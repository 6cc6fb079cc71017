"""Name the version that production uses, compare versions, and remove old ones."""

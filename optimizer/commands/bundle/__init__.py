"""Commands that use or examine a bundle."""

"""The YAML, checked: the only place of defaults."""

"""Facts about architectures, as data."""

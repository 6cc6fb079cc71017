"""Settings of this process that a number or its memory depends on."""

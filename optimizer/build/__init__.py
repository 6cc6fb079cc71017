"""build: the lowered model becomes what the runtime loads, and what is known of it is written."""

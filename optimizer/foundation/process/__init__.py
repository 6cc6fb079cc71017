"""Settings of this process that affect results or memory."""

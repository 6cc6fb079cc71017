"""OpenVINO: its dialect, its build and its inspection."""

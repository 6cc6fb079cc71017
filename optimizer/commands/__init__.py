"""Commands of `optimize`, one file each; heavy packages are imported when a command runs."""

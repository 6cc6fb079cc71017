"""Other projects' servers, each in an environment of its own."""

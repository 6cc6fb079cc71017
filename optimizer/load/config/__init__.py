"""Reading config.json and the files beside it."""

"""Commands that serve a bundle, load it and deploy it."""

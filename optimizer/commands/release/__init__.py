"""Commands that sign, publish and promote a bundle."""

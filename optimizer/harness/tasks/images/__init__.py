"""Tasks whose input is an image."""

NOT_IN_BROWSER = "the page there reads texts, not images"

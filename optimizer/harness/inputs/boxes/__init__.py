"""Images with boxes, of which the model reads each by itself."""

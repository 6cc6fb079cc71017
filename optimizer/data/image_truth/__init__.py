"""Right answers about images: objects with boxes, masks of labels, depths."""

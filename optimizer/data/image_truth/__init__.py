"""Read ground truth about images: objects with boxes, poses, masks of labels, depths."""

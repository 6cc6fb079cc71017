"""What each method needs of the walk, and what it gives back."""

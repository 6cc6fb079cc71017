"""`optimize init`: a starter recipe from what a model's files and rows show."""

"""Laws of tasks whose inputs are several rows of the model each."""

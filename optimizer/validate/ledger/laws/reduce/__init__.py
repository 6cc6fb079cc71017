"""Laws of checkpoints that were made smaller or trained, a file per hop or subject."""

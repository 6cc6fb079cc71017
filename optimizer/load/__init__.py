"""From a model source and data specs to a checked checkpoint folder and samples."""

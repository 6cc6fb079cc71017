"""Publish to the Hugging Face Hub and to MLflow, which hold each version as a folder of files."""

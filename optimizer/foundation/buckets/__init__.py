"""Objects in buckets of S3, Google Cloud Storage and Azure Blob Storage."""

"""What the bundle's own server keeps under load: measured after packaging, and gated."""

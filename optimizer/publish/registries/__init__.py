"""Read and write OCI registries, and OCI image layouts on disks and in object stores."""

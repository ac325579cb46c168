"""What lies on disk: headers, index, containment, resolution of ids. Nothing here imports torch."""

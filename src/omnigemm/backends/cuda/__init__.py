"""What NVIDIA GPUs will need. No backend is registered here yet: nothing claims support."""

"""The C kernels: sources, and how they are compiled and called."""

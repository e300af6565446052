"""Attention, scoring and packing operations: one folder each, plain torch beside the fast path."""

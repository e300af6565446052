"""What the Triton kernels share: dividing rows of unequal length among programs, and reading stored tokens."""

FUSED = {"enable_fp_fusion": True}
"""Of every launch: products are added in one instruction, as was Triton's default up to 3.8; 3.9 warns that it asks for a
choice, and 3.10 would choose otherwise."""

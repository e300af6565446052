"""What the Triton kernels share: dividing rows of unequal length among programs, and reading stored tokens."""

"""kvfuzz: property-based verification and fuzzing of KV-cache layouts on real Triton kernels."""

__version__ = "0.1.0"

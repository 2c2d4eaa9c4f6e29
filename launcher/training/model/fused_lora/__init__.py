"""LoRA and DoRA layers whose adapters are part of the base's matmuls; see kernels/README.md for the equations."""

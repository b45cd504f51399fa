"""The engine's parts for an NVIDIA GPU. `assemble` imports anywhere; the others need Triton."""

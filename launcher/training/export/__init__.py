"""Export of trained runs: adapters, merged models, GGUF files and model cards."""

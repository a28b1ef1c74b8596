"""Everything that is Wan: families, loading, conditioning, guidance, adapters, export. Knows nothing of Ray or engines."""

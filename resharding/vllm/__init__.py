"""vLLM's side of a weight sync: its weight-transfer engine, loading into modules, and the loaders' trace."""

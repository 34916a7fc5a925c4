"""vLLM's side of a weight sync: the registered weight-transfer engine, loading into its modules, the trace of
its loaders."""

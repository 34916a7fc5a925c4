"""vLLM's side of a hand-over: the registered weight-transfer engine, loading into its modules, the trace of its loaders."""

"""`mrl plan --stream`: a run in simulated time, around the ledger, admission and router of a real one."""

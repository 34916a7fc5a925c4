"""`mrl plan`: does a configuration fit its hardware, and what does a step cost? No device, no weights, no engine."""

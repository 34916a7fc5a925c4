"""`mrl plan`: whether a configuration fits its hardware, and what a step costs, without any device."""

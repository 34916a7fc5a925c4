"""`mrl plan`: check that a configuration fits its hardware, and estimate a step's cost, without devices."""

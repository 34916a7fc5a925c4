"""What is equal to what in maths: a module for each kind of thing that an answer may be."""

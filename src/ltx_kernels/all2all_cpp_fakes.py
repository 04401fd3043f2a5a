"""Shapes of the ops of all2all_cpp, which imports this module when it is imported itself."""

"""Shapes of the ops of blockwise_cpp, which imports this module when it is imported itself."""

"""Whole models of other libraries: made faster in place, and loaded in 4 bits."""

from halfbyte import library as library  # what a model calls under torch.compile are the operators

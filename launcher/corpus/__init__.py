"""Data before training: anybody's rows become packed Arrow, once, so that no tokeniser runs while a GPU is waiting."""

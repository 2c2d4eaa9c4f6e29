"""Everything that imports torch. The same training loop runs on a CPU, on one GPU and on many nodes.

It never imports render, launch or cli.
"""

"""The torch world: one loop, on two CPU cores, on one GPU and on many nodes. It never imports render, launch or cli."""

"""Check that all nodes have equal software, plan and data, and measure their links, before the model is built."""

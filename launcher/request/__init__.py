"""From command-line flags to a planned run and its directory."""
